//! `metaltail chat` with its input piped in.

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use std::fs;

use models::{ask, demo, piped};
use program::{Outcome, tiny};
use serde_json::Value;

const QUESTION: &str = "Define \"hummingbird\".";
const GREEDY: [&str; 2] = ["--temperature", "0"];

/// A conversation with the demo model that can leave files in `dir`.
fn chat_in(dir: &std::path::Path, lines: &[&str], more: &[&str]) -> Outcome {
    let model = demo();
    let args = ["chat", "--model", model.to_str().unwrap(), "--max-tokens", "12"];
    piped(dir, &[&args[..], more].concat(), &lines.join("\n"))
}

fn chat(lines: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    chat_in(dir.path(), lines, &GREEDY).expect(0).stdout
}

#[test]
fn a_question_is_answered_as_run_answers_it_and_the_end_of_input_ends_it() {
    let answer = ask(&[QUESTION, "--temperature", "0", "--max-tokens", "12"]);
    assert_eq!(chat(&[QUESTION]).trim_end(), answer["text"].as_str().unwrap());
    assert_eq!(chat(&[]), "");
    assert_eq!(chat(&["/quit", QUESTION]), "", "nothing is answered after the end");
}

#[test]
fn every_command_answers() {
    let help = chat(&["/help"]);
    for part in ["/help", "/reset", "/system", "/stats", "/save"] {
        assert!(help.contains(part), "{part}: {help}");
    }
    let unknown = chat(&["/nonsense and more"]);
    assert!(unknown.contains("/nonsense") && unknown.contains("/help"), "{unknown}");
    let stats = chat(&["/stats"]);
    for part in ["prefill", "decode", "experts", "drive", "memory"] {
        assert!(stats.contains(part), "{part}: {stats}");
    }
    assert!(chat(&["/save"]).contains("name a file"));
}

/// The numbers of prompt rows computed, as each `/stats` tells.
fn prefills(output: &str) -> Vec<u64> {
    let rows = |line: &str| line.strip_prefix("prefill")?.split_whitespace().next()?.parse().ok();
    output.lines().filter_map(rows).collect()
}

#[test]
fn a_second_question_computes_only_what_is_new() {
    let second = "And a small one?";
    let rows = prefills(&chat(&[QUESTION, "/stats", second, "/stats"]));
    let [first, next] = rows[..] else { panic!("{rows:?}") };
    let alone = prefills(&chat(&[second, "/stats"]))[0];
    assert_eq!(first, 14);
    // The whole second prompt is the first one, its answer and the second question.
    assert!(next < first + 12, "{next} rows were computed for a question that takes {alone} alone");
    assert!(next <= alone, "{next} rows were computed for a question that takes {alone} alone");
}

#[test]
fn a_conversation_has_a_memory_until_it_is_reset() {
    let name = "My name is Ada. Remember it.";
    let ask = "What is my name?";
    let one = chat(&[ask]);
    assert_eq!(chat(&[name, "/reset", ask]).lines().last(), one.lines().last());
    let rows = prefills(&chat(&[name, "/reset", ask, "/stats"]));
    let alone = prefills(&chat(&[ask, "/stats"]));
    // What both prompts begin with was computed before the reset, and need not be again.
    assert!(rows[0] <= alone[0], "{rows:?} {alone:?}");
}

#[test]
fn save_writes_the_conversation_as_json() {
    let dir = tempfile::tempdir().unwrap();
    let lines = ["/system Be brief.", QUESTION, "/save talk to keep.json", "/reset", "/save empty.json"];
    let out = chat_in(dir.path(), &lines, &GREEDY).expect(0).stdout;
    assert!(out.contains("saved to talk to keep.json"), "{out}");
    let read =
        |name: &str| -> Value { serde_json::from_slice(&fs::read(dir.path().join(name)).unwrap()).unwrap() };
    let saved = read("talk to keep.json");
    let messages = saved["messages"].as_array().unwrap();
    let roles: Vec<&str> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant"]);
    assert_eq!((&messages[0]["content"], &messages[1]["content"]), (&"Be brief.".into(), &QUESTION.into()));
    assert!(out.contains(messages[2]["content"].as_str().unwrap()), "{out}");
    assert_eq!(read("empty.json")["messages"].as_array().unwrap().len(), 1, "the system prompt stays");
    let out = chat_in(dir.path(), &["/save nowhere/x.json", QUESTION], &[]).expect(0).stdout;
    assert!(out.contains("not saved"), "{out}");
    assert!(out.lines().count() >= 2, "the conversation goes on: {out}");
}

#[test]
fn a_system_prompt_begins_anew_and_changes_the_prompt() {
    let rows = |lines: &[&str]| prefills(&chat(lines));
    let plain = rows(&[QUESTION, "/stats"])[0];
    assert!(rows(&["/system Answer in French.", QUESTION, "/stats"])[0] > plain);
    let out = chat(&["/system Answer in French.", "/system", QUESTION, "/stats"]);
    assert!(out.contains("system prompt set") && out.contains("system prompt removed"), "{out}");
    assert_eq!(prefills(&out), [plain]);
}

#[test]
fn a_line_that_ends_with_a_backslash_goes_on() {
    let joined = chat(&["Write a poem\\", "about rain.", "/save talk.json", "/stats"]);
    let one = ask(&["Write a poem\nabout rain.", "--temperature", "0", "--max-tokens", "12"]);
    let answer = one["text"].as_str().unwrap();
    assert!(joined.starts_with(answer), "{joined} {answer}");
}

#[test]
fn a_question_that_fails_is_taken_back_and_the_session_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let long = "word ".repeat(200);
    let lines = [&long, QUESTION, "/save talk.json"];
    let outcome = chat_in(dir.path(), &lines, &["--context", "64"]).expect(0);
    assert!(outcome.stderr.contains("64"), "{}", outcome.stderr);
    let saved: Value = serde_json::from_slice(&fs::read(dir.path().join("talk.json")).unwrap()).unwrap();
    assert_eq!(saved["messages"].as_array().unwrap().len(), 2, "{saved}");
}

#[test]
fn a_line_that_is_no_text_is_told_and_the_conversation_goes_on() {
    let model = demo();
    let output = program::program(&model)
        .args(["chat", "--model", model.to_str().unwrap()])
        .write_stdin(&b"hello \xff\n/nonsense\n"[..])
        .output()
        .unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stdout}");
    assert!(stdout.contains("not UTF-8") && stdout.contains("/nonsense"), "{stdout}");
}

#[test]
fn a_seed_is_reported_and_its_answers_can_be_had_again() {
    let dir = tempfile::tempdir().unwrap();
    let answers = |seed: &str| {
        let more = ["--temperature", "1", "--seed", seed];
        chat_in(dir.path(), &[QUESTION, QUESTION], &more).expect(0)
    };
    let first = answers("11");
    assert!(first.stderr.contains("seed 11"), "{}", first.stderr);
    assert_eq!(first.stdout, answers("11").stdout);
    assert_ne!(first.stdout, answers("12").stdout);
    let drawn = chat_in(dir.path(), &[], &[]).expect(0).stderr;
    assert!(drawn.contains("seed "), "{drawn}");
}

#[test]
fn what_cannot_talk_is_refused() {
    let dir = tiny("slab");
    let refused = piped(dir.path(), &["chat", "--model", "model", "--json"], "").expect(2);
    assert!(refused.error().contains("run --json"), "{}", refused.stdout);
    fs::remove_file(dir.path().join("model/tokenizer_config.json")).unwrap();
    let refused = piped(dir.path(), &["chat", "--model", "model"], "hello").expect(3);
    assert!(refused.stderr.contains("chat template"), "{}", refused.stderr);
    piped(dir.path(), &["chat", "--model", "nowhere"], "").expect(3);
}
