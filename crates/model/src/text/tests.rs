//! What stands where a file of the model should: every reader of this room refuses it by name.

use super::*;

/// Each file that is read here, with the error that reading a directory with it gives.
fn read(dir: &Path, name: &str) -> TextError {
    match name {
        "tokenizer.json" => Tokenizer::from_dir(dir).unwrap_err(),
        _ => ChatTemplate::from_dir(dir).unwrap_err(),
    }
}

const FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

#[test]
fn a_directory_in_a_files_place_is_refused() {
    for name in FILES {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join(name)).unwrap();
        let error = read(dir.path(), name);
        assert!(matches!(error, TextError::NotAFile { found: "a directory", .. }), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[cfg(unix)]
#[test]
fn a_device_or_socket_is_refused_also_behind_a_link() {
    for name in FILES {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/zero", dir.path().join(name)).unwrap();
        let error = read(dir.path(), name);
        assert!(matches!(error, TextError::NotAFile { .. }), "{error}");
        std::fs::remove_file(dir.path().join(name)).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path().join(name)).unwrap();
        let error = read(dir.path(), name);
        assert!(matches!(error, TextError::NotAFile { .. }), "{error}");
    }
}

#[cfg(unix)]
#[test]
fn a_pipe_without_a_writer_is_refused_and_not_waited_for() {
    for name in FILES {
        let dir = tempfile::tempdir().unwrap();
        let made = std::process::Command::new("mkfifo").arg(dir.path().join(name)).status();
        assert!(made.unwrap().success());
        let error = read(dir.path(), name);
        assert!(error.to_string().contains("a pipe, socket or device"), "{error}");
    }
}

#[cfg(unix)]
#[test]
fn a_link_to_a_file_is_followed_and_one_to_nothing_is_named() {
    for name in FILES {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("blobs/gone", dir.path().join(name)).unwrap();
        let error = read(dir.path(), name);
        assert!(matches!(error, TextError::DanglingLink { .. }), "{error}");
        assert!(error.to_string().contains(name) && error.to_string().contains("blobs/gone"), "{error}");
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("blob"), "J").unwrap();
    std::os::unix::fs::symlink("blob", dir.path().join("chat_template.jinja")).unwrap();
    assert_eq!(ChatTemplate::from_dir(dir.path()).unwrap().unwrap().source(), "J");
}
