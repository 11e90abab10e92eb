//! Golden prompts: what Python's Jinja 3.1.6 renders with the settings of transformers.

use super::*;

const AGENT: &str = include_str!("testdata/agent.jinja");

fn template(source: &str) -> ChatTemplate {
    let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null});
    let mut template = ChatTemplate::parse(source.to_owned(), "chat_template.jinja".into(), &config).unwrap();
    // No golden prompt may depend on how busy the machine is.
    template.patience = Duration::from_secs(3600);
    template
}

fn extra(json: serde_json::Value) -> Map<String, serde_json::Value> {
    json.as_object().unwrap().clone()
}

fn agent_messages() -> Vec<serde_json::Value> {
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Wie wärs"}, "?"]},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOK", "tool_calls": [
            {"function": {"name": "f", "arguments": {"x": 1.0, "s": "a", "l": [true, null]}}}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": {"a": [1, "b"]}},
        {"role": "user", "content": "go on "},
        {"role": "assistant", "content": "x", "reasoning_content": " because "},
    ]);
    messages.as_array().unwrap().clone()
}

#[test]
fn tools_reasoning_and_calls_render_as_the_reference() {
    let tools = json!([{"name": "f", "description": "é<b>'", "n": 1e-05}]);
    let prompt = template(AGENT).render(&agent_messages(), true, &extra(json!({"tools": tools})));
    assert_eq!(
        prompt.unwrap(),
        "[gMASK]<sop><|system|>\n# Tools\n{\"name\": \"f\", \"description\": \"é<b>'\", \"n\": 1e-05}\n\
         <|system|>Be brief.<|user|>Wie wärs?<|assistant|></think>OK<tool_call>f<arg_key>x</arg_key>\
         <arg_value>1.0</arg_value><arg_key>s</arg_key><arg_value>a</arg_value><arg_key>l</arg_key>\
         <arg_value>[true, null]</arg_value></tool_call><|observation|><tool_response>1</tool_response>\
         <tool_response>{'a': [1, 'b']}</tool_response><|user|>go on <|assistant|>\
         <think>because</think>x<|assistant|><think>"
    );
}

#[test]
fn each_thinking_switch_renders_as_the_reference() {
    let template = template(AGENT);
    let messages = &agent_messages()[..2];
    let head = "[gMASK]<sop><|system|>Be brief.<|user|>Wie wärs?";
    for (switches, prompt, tail) in [
        (json!({"enable_thinking": false}), true, "<|assistant|></think>"),
        (json!({"enable_thinking": true}), true, "<|assistant|><think>"),
        (json!({}), true, "<|assistant|><think>"),
        (json!({"enable_thinking": false}), false, ""),
    ] {
        let rendered = template.render(messages, prompt, &extra(switches)).unwrap();
        assert_eq!(rendered, format!("{head}{tail}"));
    }
}

#[test]
fn whitespace_none_and_lists_render_as_the_reference() {
    let source = "{{ bos_token }}{% for m in messages %}\n  {% if m.content is none %}\n  \
                  {{ m.content }}|{{ true }}|{{ [1, 'a', none] }}|{{ missing }}\n  {% else %}\n    \
                  {{- m['content'] | trim | upper }}\n  {% endif %}\n\
                  {% if loop.index0 == 2 %}{% break %}{% endif %}\n{% endfor %}\ntail\n";
    let messages = [
        json!({"content": " a "}),
        json!({"content": null}),
        json!({"content": "b"}),
        json!({"content": "c"}),
    ];
    let rendered = template(source).render(&messages, false, &Map::new()).unwrap();
    assert_eq!(rendered, "<s>A\n  None|True|[1, 'a', None]|\nB\ntail");
}

#[test]
fn the_demo_model_gets_its_prompt() {
    let Some(dir) = super::super::demo_model() else {
        return;
    };
    let template = ChatTemplate::from_dir(&dir).unwrap().unwrap();
    let messages = [
        message("system", "S"),
        message("user", "Hello"),
        message("assistant", "Hi"),
        message("user", " <b>"),
    ];
    let rendered = template.render(&messages, true, &Map::new()).unwrap();
    assert_eq!(
        rendered,
        "[gMASK]<sop><|system|>S<|user|>Hello<|assistant|><think></think>Hi<|user|> <b><|assistant|><think></think>"
    );
    assert!(!template.render(&messages, false, &Map::new()).unwrap().ends_with("</think>"));
}

#[test]
fn a_refusal_speaks_in_the_templates_words() {
    let messages = [message("wizard", "x")];
    let error = template(AGENT).render(&messages, true, &Map::new()).unwrap_err();
    assert!(
        matches!(&error, TextError::TemplateRefused { message } if message == "Unknown role: wizard"),
        "{error}"
    );
}

#[test]
fn an_endless_template_ends_in_an_error() {
    for source in [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 99999999999 }}",
        "{% set ns = namespace(s='x') %}{% for a in range(99999) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s=['x']) %}{% for a in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}",
        "{% set ns = namespace(s=['x']) %}{% for a in range(40) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    ] {
        let error = template(source).render(&[], false, &Map::new()).unwrap_err();
        assert!(matches!(error, TextError::TemplateRender { .. }), "{error}");
    }
}

#[test]
fn a_template_nested_to_the_largest_size_ends_in_an_answer_and_not_in_an_overflow() {
    for (head, unit, tail) in [
        ("{{ ", "not ", "1 }}"),
        ("{{ 1 ", "-", "1 }}"),
        ("{{ 1", "+1", " }}"),
        ("{{ a", ".b", " }}"),
        ("{{ a", "()", " }}"),
        ("{{ a", "|f", " }}"),
        ("{{ ", "[", " }}"),
        ("", "{%if a%}", ""),
    ] {
        let repeats = (MAX_TEMPLATE_BYTES as usize - head.len() - tail.len()) / unit.len();
        let source = format!("{head}{}{tail}", unit.repeat(repeats));
        let parsed = ChatTemplate::parse(source, "x/chat_template.jinja".into(), &json!({}));
        let answer = parsed.and_then(|template| template.render(&[], false, &Map::new()));
        if let Err(error) = answer {
            assert!(error.to_string().contains("x/chat_template.jinja"), "{unit}: {error}");
        }
    }
}

#[test]
fn values_nested_as_deep_as_the_fuel_allows_are_written_and_dropped_without_an_overflow() {
    let source = "{% set ns = namespace(s=[1]) %}{% for a in range(40) %}{% for b in range(10000) %}\
                  {% set ns.s = [ns.s] %}{% endfor %}{% endfor %}";
    let written = template(&format!("{source}{{{{ (ns.s ~ '') | length }}}}"));
    assert_eq!(written.render(&[], false, &Map::new()).unwrap(), "800003");
    let indented = template(&format!("{source}{{{{ ns.s | pprint }}}}"));
    assert!(indented.render(&[], false, &Map::new()).is_err(), "its text has the square of the depth");
    let dropped = template(&source.replace("40", "99999"));
    let error = dropped.render(&[], false, &Map::new()).unwrap_err();
    assert!(matches!(error, TextError::TemplateRender { .. }), "{error}");
}

#[test]
fn a_template_above_the_largest_size_is_refused_by_name() {
    let source = "x".repeat(MAX_TEMPLATE_BYTES as usize + 1);
    let error = ChatTemplate::parse(source.clone(), "tokenizer_config.json".into(), &json!({})).unwrap_err();
    assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    assert!(matches!(ChatTemplate::from_dir(dir.path()), Err(TextError::TooLarge { .. })));
}

#[test]
fn work_that_costs_no_fuel_ends_with_the_callers_patience() {
    let source = "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}\
                  {% endfor %}{{ ns.s|length }}";
    let mut template = template(source);
    template.patience = Duration::from_millis(20);
    let error = template.render(&[], false, &Map::new()).unwrap_err();
    assert!(matches!(error, TextError::TemplateLate { .. }), "{error}");
    assert!(error.to_string().contains("within 0.02 s"), "{error}");
}

#[test]
fn a_template_that_does_not_parse_is_named() {
    let parsed = ChatTemplate::parse("{% if %}".to_owned(), "x/chat_template.jinja".into(), &json!({}));
    let error = parsed.unwrap_err().to_string();
    assert!(error.contains("x/chat_template.jinja"), "{error}");
}

#[test]
fn generation_tags_add_nothing() {
    let source =
        "a {%- generation -%} {{ '{% generation %}' }} {%- endgeneration %} b {% if true %}c{% endif %}";
    let rendered = template(source).render(&[], false, &Map::new()).unwrap();
    assert_eq!(rendered, "a{% if true %} b c");
}

#[test]
fn the_jinja_file_wins_and_the_default_of_a_list_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    assert!(ChatTemplate::from_dir(dir.path()).unwrap().is_none());
    let list = json!([{"name": "rag", "template": "R"}, {"name": "default", "template": "D{{ eos_token }}"}]);
    let config = json!({"chat_template": list, "eos_token": {"content": "<e>", "lstrip": false}});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let render = || ChatTemplate::from_dir(dir.path()).unwrap().unwrap().render(&[], false, &Map::new());
    assert_eq!(render().unwrap(), "D<e>");
    std::fs::write(dir.path().join("chat_template.jinja"), "J{{ eos_token }}").unwrap();
    assert_eq!(render().unwrap(), "J<e>");
}

#[test]
fn a_template_of_a_wrong_type_is_refused() {
    for bad in ["7", r#"{"chat_template": 7}"#.replace("7", "[{}]").as_str(), r#"{"chat_template": 7}"#, "{"]
    {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer_config.json"), bad).unwrap();
        match ChatTemplate::from_dir(dir.path()) {
            // A number has no fields, so it is a configuration without a template.
            Ok(None) => assert_eq!(bad, "7"),
            other => assert!(matches!(other, Err(TextError::Malformed { .. })), "{bad}: {other:?}"),
        }
    }
}
