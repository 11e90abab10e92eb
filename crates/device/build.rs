//! Compiles the Metal kernels for the processor where the feature `msl-cpu` asks for it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "msl-cpu")]
    msl::compile();
}

#[cfg(feature = "msl-cpu")]
#[path = "src/metal/source.rs"]
mod source;

#[cfg(feature = "msl-cpu")]
#[path = "tests/kernels/planted.rs"]
mod planted;

#[cfg(feature = "msl-cpu")]
mod msl {
    use std::path::PathBuf;

    use metaltail_mslcpu::build::{self, Unit};

    use crate::{planted, source};

    /// The kernels as a Mac gets them, and copies with one mistake each for the tests.
    pub fn compile() {
        for path in ["kernels", "src/metal/source.rs", "tests/kernels/planted.rs"] {
            println!("cargo:rerun-if-changed={path}");
        }
        let mut units = vec![Unit {
            name: "metal".into(),
            source: source::source(),
            prefix: String::new(),
            spaces: true,
        }];
        // A sanitiser is for the kernels themselves; the copies would take most of the time.
        let copies = if std::env::var_os("MSL_SANITIZE").is_none() { &planted::PLANTED[..] } else { &[] };
        for (number, plant) in copies.iter().enumerate() {
            let text = planted(plant).unwrap_or_else(|message| fail(&message));
            units.push(Unit {
                name: format!("planted{number}"),
                source: text,
                prefix: planted::prefix(number),
                spaces: false,
            });
        }
        let Some(out) = std::env::var_os("OUT_DIR").map(PathBuf::from) else {
            fail("OUT_DIR is not set: this is Cargo's build script")
        };
        if let Err(error) = build::compile(&units, &out) {
            fail(&error.to_string());
        }
    }

    /// A file's unit with one passage changed.
    fn planted(plant: &planted::Planted) -> Result<String, String> {
        let of_file = |name: &str| source::FILES.iter().find(|file| file.0 == name).copied();
        let file = of_file(plant.kind.unit)
            .ok_or_else(|| format!("{}: there is no such kernel file", plant.kind.unit))?;
        let unit = source::joined(&[&source::COMMON[..], &[file]].concat());
        match unit.matches(plant.passage).count() {
            1 => Ok(unit.replace(plant.passage, plant.mistake)),
            n => Err(format!(
                "{}: the passage {:?} is there {n} times, wanted once",
                plant.kind.unit, plant.passage
            )),
        }
    }

    fn fail(text: &str) -> ! {
        for line in text.lines() {
            println!("cargo:error={line}");
        }
        std::process::exit(1)
    }
}
