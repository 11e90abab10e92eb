//! Settings as their users meet them: an argument list, an environment and a file's text.

use std::path::Path;

use super::*;

fn resolve(args: &[&str], variables: &[(&str, &str)], file: &str) -> Result<Settings, SettingsError> {
    let command = Flags::augment_args(clap::Command::new("run"));
    let matches = command.try_get_matches_from([&["run"], args].concat()).unwrap();
    let environment: Environment = variables.iter().copied().collect();
    let file = ConfigFile::parse(Path::new("metaltail.toml"), file)?;
    Settings::resolve(&matches, &environment, Some(&file))
}

fn message(args: &[&str], variables: &[(&str, &str)], file: &str) -> String {
    resolve(args, variables, file).unwrap_err().to_string()
}

#[test]
fn flag_over_environment_over_file_over_default() {
    let file = "cap = 1\nloaders = 2\nthreads = 3\n";
    let variables = [("METALTAIL_CAP", "10"), ("METALTAIL_LOADERS", "20"), ("PATH", "/bin")];
    let settings = resolve(&["--cap", "100"], &variables, file).unwrap();
    assert_eq!((settings.cap, settings.origin("cap")), (Some(100), Origin::Flag));
    assert_eq!((settings.loaders, settings.origin("loaders")), (Some(20), Origin::Environment));
    assert_eq!((settings.threads, settings.origin("threads")), (Some(3), Origin::File));
    assert_eq!((settings.context, settings.origin("context")), (None, Origin::Default));
}

#[test]
fn zero_and_off_are_values_too() {
    let variables = [("METALTAIL_EXACT", "off"), ("METALTAIL_TEMPERATURE", "0")];
    let file = "exact = true\ncap = 0\nchecksums = false\ntemperature = 0.7\n";
    let settings = resolve(&["--top-k", "0"], &variables, file).unwrap();
    assert_eq!(settings.exact, Some(false));
    assert_eq!(settings.temperature, Some(0.0));
    assert_eq!(settings.cap, Some(0));
    assert_eq!(settings.checksums, Some(false));
    assert_eq!((settings.top_k, settings.origin("top_k")), (Some(0), Origin::Flag));
    let settings = resolve(&["--exact=off", "--cap=0"], &[("METALTAIL_CAP", "5")], "exact = 1").unwrap();
    assert_eq!((settings.exact, settings.cap), (Some(false), Some(0)));
}

#[test]
fn switches_need_no_value() {
    let settings = resolve(&["--exact", "-v", "--json"], &[], "").unwrap();
    assert_eq!(settings.exact, Some(true));
    assert_eq!((settings.output.verbose, settings.output.json), (Some(true), Some(true)));
    let settings = resolve(&[], &[("METALTAIL_JSON", "1"), ("METALTAIL_VERBOSE", "true")], "").unwrap();
    assert_eq!((settings.output.verbose, settings.output.json), (Some(true), Some(true)));
}

#[test]
fn an_unknown_name_suggests_the_near_one() {
    let unknown = message(&[], &[("METALTAIL_LOADER", "4")], "");
    assert!(unknown.contains("METALTAIL_LOADER ") && unknown.contains("METALTAIL_LOADERS"), "{unknown}");
    let unknown = message(&[], &[], "prefil_chunk = 4");
    assert!(unknown.contains("`prefil_chunk`") && unknown.contains("`prefill-chunk`"), "{unknown}");
    let unknown = message(&[], &[("METALTAIL_prefill_chunk", "4")], "");
    assert!(unknown.contains("METALTAIL_PREFILL_CHUNK"), "{unknown}");
    let unknown = message(&[], &[("METALTAIL_", "4")], "");
    assert!(unknown.contains("METALTAIL_ "), "{unknown}");
}

#[test]
fn a_name_marked_later_is_unknown() {
    assert!(resolve(&[], &[("METALTAIL_KV_DIR", "x")], "").is_err());
    assert!(resolve(&[], &[("METALTAIL_DRAFT", "mtp")], "").is_err());
    assert!(resolve(&[], &[], "kv-dir = 'x'").is_err());
}

#[test]
fn usage_and_pins_are_words_or_files() {
    let usage = |text: &str| resolve(&[], &[("METALTAIL_USAGE", text)], "").unwrap().usage.clone().unwrap();
    assert_eq!(usage("off"), Usage::Off);
    assert_eq!(usage("on"), Usage::On(None));
    assert_eq!(usage("read-only"), Usage::ReadOnly(None));
    assert_eq!(usage("read-only:a b"), Usage::ReadOnly(Some("a b".into())));
    assert_eq!(usage("./off"), Usage::On(Some("./off".into())));
    let settings = resolve(&["--pin-size", "2G"], &[], "pin = 'x.pins'\nusage = 'off'").unwrap();
    assert_eq!((settings.pin.clone(), settings.pin_size), (Some(Pin::File("x.pins".into())), Some(2 << 30)));
    assert_eq!((&settings.config()["pin"], &settings.config()["usage"]), (&"x.pins".into(), &"off".into()));
    for bad in ["", "read-only:"] {
        assert!(message(&[], &[("METALTAIL_USAGE", bad)], "").contains("METALTAIL_USAGE"), "{bad}");
    }
    assert!(message(&[], &[], "pin = ''").contains("`pin`"));
}

#[test]
fn a_variable_of_another_program_does_no_harm() {
    // T67: the temperature's variable was the system's directory for temporary files.
    let settings = resolve(&[], &[("TEMP", "/tmp"), ("TEMPERATURE", "hot")], "").unwrap();
    assert_eq!(settings.temperature, None);
}

#[test]
fn a_value_is_parsed_whole_or_refused_with_its_place() {
    for (name, value) in [
        ("METALTAIL_TEMPERATURE", "/tmp"),
        ("METALTAIL_TEMPERATURE", "0.7x"),
        ("METALTAIL_CAP", "8.5"),
        ("METALTAIL_CAP", ""),
        ("METALTAIL_SEED", "-1"),
        ("METALTAIL_RAM", "24X"),
        ("METALTAIL_DIRECT", "maybe"),
        ("METALTAIL_EXACT", "yes"),
    ] {
        // A flag that wins does not hide the mistake.
        let refused = message(&["--cap", "1"], &[(name, value)], "");
        assert!(refused.contains(name), "{refused}");
    }
    let refused = message(&[], &[], "cap = [1, 2]");
    assert!(refused.contains("`cap` in metaltail.toml"), "{refused}");
    let refused = message(&[], &[], "top-p = 1.5");
    assert!(refused.contains("above 0 and at most 1"), "{refused}");
    assert!(message(&[], &[], "direct = 'sideways'").contains("possible values: auto, on, off"));
    assert!(message(&[], &[], "top-k = 1\ntop_k = 2").contains("twice"));
    assert!(message(&[], &[], "cap =").contains("metaltail.toml"));
    assert!(message(&[], &[], "cap = 1.0").contains("whole number"));
    assert!(message(&[], &[], "threads = 1025").contains("from 1 to 1024"));
    assert!(message(&[], &[], "seed = -1").contains("`seed` in metaltail.toml"));
}

#[test]
fn a_seed_that_toml_cannot_hold_can_be_a_text() {
    for number in ["9223372036854775808", "18446744073709551615"] {
        let refused = message(&[], &[], &format!("seed = {number}"));
        assert!(refused.contains("as a text"), "{number}: {refused}");
    }
    assert_eq!(resolve(&[], &[], "seed = '18446744073709551615'").unwrap().seed, Some(u64::MAX));
}

#[test]
fn stops_come_from_one_place_only() {
    let file = "stop = ['a', 'b']";
    assert_eq!(resolve(&[], &[], file).unwrap().stop, ["a", "b"]);
    assert_eq!(resolve(&[], &[("METALTAIL_STOP", "x,y")], file).unwrap().stop, ["x,y"]);
    assert_eq!(resolve(&["--stop", "-1", "--stop=z"], &[], file).unwrap().stop, ["-1", "z"]);
}

#[test]
fn config_has_every_flag_with_underscores() {
    let variables = [("METALTAIL_MODEL", "/models/x"), ("METALTAIL_RAM", "2G")];
    let settings =
        resolve(&["--direct", "off", "--prefill-chunk", "7", "--checksums=on"], &variables, "").unwrap();
    let config = settings.config();
    assert_eq!(config["model"], "/models/x");
    assert_eq!(config["ram"], 2u64 << 30);
    assert_eq!(config["direct"], "off");
    assert_eq!(config["checksums"], "on");
    assert_eq!(config["prefill_chunk"], 7);
    assert_eq!(config["cap"], serde_json::Value::Null);
    let ids: Vec<String> = declared().iter().map(|arg| arg.get_id().to_string()).collect();
    assert_eq!(ids.len(), config.len());
    assert!(ids.iter().all(|id| config.contains_key(id)), "{ids:?} {config:?}");
    assert_eq!(settings.origins()["ram"], "environment");
}

#[test]
fn the_first_file_found_is_the_one_read() {
    let (here, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let environment = |extra: &[(&str, &str)]| -> Environment {
        let xdg = ("XDG_CONFIG_HOME", home.path().to_str().unwrap());
        extra.iter().copied().chain([xdg]).collect()
    };
    let path_found = |environment: &Environment| {
        ConfigFile::find(environment, here.path()).map(|file| file.map(|file| format!("{file:?}")))
    };
    assert!(path_found(&environment(&[])).unwrap().is_none());
    std::fs::create_dir(home.path().join("metaltail")).unwrap();
    std::fs::write(home.path().join("metaltail/metaltail.toml"), "cap = 111").unwrap();
    assert!(path_found(&environment(&[])).unwrap().unwrap().contains("111"));
    std::fs::write(here.path().join("metaltail.toml"), "cap = 222").unwrap();
    assert!(path_found(&environment(&[])).unwrap().unwrap().contains("222"));
    std::fs::write(here.path().join("named.toml"), "cap = 333").unwrap();
    assert!(
        path_found(&environment(&[("METALTAIL_CONFIG", "named.toml")])).unwrap().unwrap().contains("333")
    );
    let absent = path_found(&environment(&[("METALTAIL_CONFIG", "absent.toml")])).unwrap_err().to_string();
    assert!(absent.contains("absent.toml"), "{absent}");
    let empty = path_found(&environment(&[("METALTAIL_CONFIG", "")])).unwrap_err().to_string();
    assert!(empty.contains("METALTAIL_CONFIG") && empty.contains("empty"), "{empty}");
    assert!(path_found(&environment(&[("METALTAIL_CONFIG", "/dev/zero")])).is_err());
}
