//! A process that may open few files. Alone in its program, since the limit is the whole process's.
#![cfg(unix)]

#[path = "support/reading.rs"]
mod support;

use metaltail_container::{Checkpoint, Error};
use rustix::process::{Resource, getrlimit, setrlimit};
use support::{hf_shard, inventory, model_dir};

#[test]
fn too_few_file_handles_are_no_fault_of_the_model() {
    let (rest, _) = hf_shard(&inventory(1, false)).split(|_| false);
    let dir = model_dir(&rest);
    for i in 0..40 {
        let mut shard = support::Shard::default();
        shard.tensor(&format!("extra.{i}"), "F32", &[1], vec![0; 4]);
        shard.write(&dir.path().join(format!("extra-{i}.safetensors")));
    }
    let before = getrlimit(Resource::Nofile);
    let mut few = getrlimit(Resource::Nofile);
    few.current = Some(20);
    setrlimit(Resource::Nofile, few).unwrap();
    let opened = Checkpoint::open(dir.path());
    setrlimit(Resource::Nofile, before).unwrap();
    let error = opened.unwrap_err();
    assert!(matches!(error, Error::OpenFiles { .. }) && error.is_io(), "{error}");
    assert!(error.to_string().contains("`ulimit -n`"), "{error}");
    Checkpoint::open(dir.path()).unwrap();
}
