//! A fuzz target's corpus, for the tests of its crate; included by path.

/// Name and bytes of every file of the corpus `name` of the crate under test, by name.
pub fn corpus(name: &str) -> Vec<(String, Vec<u8>)> {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(name);
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let mut files: Vec<_> = files
        .map(|file| (file.file_name().to_string_lossy().into_owned(), std::fs::read(file.path()).unwrap()))
        .collect();
    files.sort();
    assert!(files.len() > 20, "the corpus {name} is not there");
    files
}
