//! Compiles kernels with the shim, for the build script of the crate that tests them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use thiserror::Error;

use crate::translate::{Purpose, TranslateError, translate};

/// Where the shim lies while this workspace is built.
const SHIM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/shim");

/// The compiler that is used where the environment names none in `MSL_CXX`.
const COMPILER: &str = "clang++-19";

/// One translation unit of Metal source.
#[derive(Clone, Debug)]
pub struct Unit {
    /// Names the unit's files; unique among the units, letters, digits and `_` only.
    pub name: String,
    /// Metal source as the Mac's compiler would get it. `#line` directives give messages their places.
    pub source: String,
    /// Put before the names of its kernels, so that two versions of a kernel can live side by side.
    pub prefix: String,
    /// Whether the address spaces of its pointers are checked, which takes a pass of its own.
    pub spaces: bool,
}

/// Why kernels could not be compiled.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A tool did not start.
    #[error(
        "{tool} could not be started ({error}): install it (on Debian: apt-get install clang-19 binutils), or name another clang++ in MSL_CXX"
    )]
    Tool {
        /// The program.
        tool: String,
        /// What the system said.
        error: io::Error,
    },
    /// A tool ended with an error.
    #[error("{tool} refused {unit}:\n{messages}")]
    Refused {
        /// The program.
        tool: String,
        /// The unit.
        unit: String,
        /// What it wrote.
        messages: String,
    },
    /// The translation refused a unit.
    #[error(transparent)]
    Translate(#[from] TranslateError),
    /// A file could not be written.
    #[error("{} could not be written: {error}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// Compiles `units` and the shim into a static library in `out`, and tells Cargo (on standard output, as build
/// scripts do) to link it. The environment's `MSL_CXX` names another compiler, `MSL_SANITIZE` sanitisers
/// (for example `undefined`) that stop the program where they find something.
///
/// # Errors
/// The first unit that was refused, or a tool that is missing.
pub fn compile(units: &[Unit], out: &Path) -> Result<(), BuildError> {
    println!("cargo:rerun-if-changed={SHIM}");
    for variable in ["MSL_CXX", "MSL_SANITIZE"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let compiler = Compiler::new(out);
    compiler.library()?;
    let mut objects = vec![compiler.object(&Path::new(SHIM).join("msl_cpu.cpp"), "msl_cpu")?];
    objects.extend(in_parallel(units, |unit| compiler.unit(unit))?);
    let library = out.join("libmslkernels.a");
    if library.exists() {
        fs::remove_file(&library).map_err(|error| BuildError::Write { path: library.clone(), error })?;
    }
    let mut archive = Command::new("ar");
    run(archive.arg("crs").arg(&library).args(&objects), "the library of kernels")?;
    println!("cargo:rustc-link-search=native={}", out.display());
    // The kernels register themselves: nothing names their objects.
    println!("cargo:rustc-link-lib=static:+whole-archive=mslkernels");
    println!("cargo:rustc-link-lib=dylib=stdc++");
    Ok(())
}

/// Does `work` on every item on as many threads as there are processors; results in the items' order.
fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<R, BuildError> + Sync,
) -> Result<Vec<R>, BuildError> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(items.len());
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(items.len()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { return };
                    let result = work(item);
                    done.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((index, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

struct Compiler<'a> {
    program: String,
    sanitizers: Option<String>,
    out: &'a Path,
}

impl<'a> Compiler<'a> {
    fn new(out: &'a Path) -> Compiler<'a> {
        let program = std::env::var("MSL_CXX").unwrap_or_else(|_| COMPILER.to_owned());
        Compiler { program, sanitizers: std::env::var("MSL_SANITIZE").ok(), out }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["-std=c++20", "-Wno-everything"]).arg(format!("-I{SHIM}"));
        // In Metal literals without a suffix are float, and half is rounded after each operation.
        command.args(["-Xclang", "-cl-single-precision-constant"]);
        if std::env::consts::ARCH == "x86_64" {
            command.args(["-mf16c", "-mfma", "-Xclang", "-ffloat16-excess-precision=none"]);
        }
        command
    }

    /// What precompiled headers and objects are made with alike.
    fn compiling(&self) -> Command {
        let mut command = self.command();
        // Without contraction a product is rounded before it is added, where the source does not say fma.
        command.args([
            "-O2",
            "-fPIC",
            "-ffp-contract=off",
            // Kernels also run with subnormals flushed (`run::Schedule::flush`): nothing may be folded on the
            // ground that x + 0 is x.
            "-fdenormal-fp-math=dynamic",
            "-fno-strict-aliasing",
            "-fno-omit-frame-pointer",
        ]);
        if let Some(sanitizers) = &self.sanitizers {
            command
                .arg(format!("-fsanitize={sanitizers}"))
                .args(["-fno-sanitize-recover=all", "-fsanitize-trap=all"]);
        }
        command
    }

    fn precompiled(&self) -> PathBuf {
        self.out.join("metal_stdlib.pch")
    }

    /// The library that every unit includes, read once: it takes longer than most units.
    fn library(&self) -> Result<(), BuildError> {
        let mut command = self.compiling();
        command.args(["-x", "c++-header"]).arg(Path::new(SHIM).join("metal_stdlib"));
        run(command.arg("-o").arg(self.precompiled()), "metal_stdlib").map(drop)
    }

    /// C++ to an object.
    fn object(&self, source: &Path, name: &str) -> Result<PathBuf, BuildError> {
        let object = self.out.join(name).with_extension("o");
        run(self.compiling().arg("-c").arg(source).arg("-o").arg(&object), name)?;
        Ok(object)
    }

    /// A unit to an object.
    fn unit(&self, unit: &Unit) -> Result<PathBuf, BuildError> {
        let metal = self.write(&unit.name, "metal", &unit.source)?;
        let source = self.preprocess(&metal, &unit.name)?;
        let file = format!("{}.metal", unit.name);
        if unit.spaces {
            let spaces = translate(&source, &file, &unit.prefix, Purpose::AddressSpaces)?;
            let spaces = self.write(&unit.name, "spaces.cpp", &spaces)?;
            run(self.command().args(["-fsyntax-only", "-DMSL_SPACES"]).arg(spaces), &unit.name)?;
        }
        let runs = translate(&source, &file, &unit.prefix, Purpose::Run)?;
        let (source, object) =
            (self.write(&unit.name, "cpp", &runs)?, self.out.join(&unit.name).with_extension("o"));
        let mut command = self.compiling();
        command.arg("-include-pch").arg(self.precompiled());
        run(command.arg("-c").arg(source).arg("-o").arg(&object), &unit.name)?;
        Ok(object)
    }

    /// Expands the source's macros. Metal's headers are empty here, so that Metal's words stay as they are.
    fn preprocess(&self, metal: &Path, unit: &str) -> Result<String, BuildError> {
        let mut command = Command::new(&self.program);
        command.args([
            "-E",
            "-x",
            "c++",
            "-std=c++20",
            "-nostdinc",
            "-D__METAL__=1",
            "-D__METAL_VERSION__=320",
        ]);
        run(command.arg(format!("-I{SHIM}/pp")).arg(metal), unit)
    }

    fn write(&self, name: &str, extension: &str, text: &str) -> Result<PathBuf, BuildError> {
        let path = self.out.join(name).with_extension(extension);
        fs::write(&path, text).map_err(|error| BuildError::Write { path: path.clone(), error })?;
        Ok(path)
    }
}

/// Runs a tool and gives what it wrote to standard output.
fn run(command: &mut Command, unit: &str) -> Result<String, BuildError> {
    let tool = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| BuildError::Tool { tool: tool.clone(), error })?;
    if !output.status.success() {
        let messages = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(BuildError::Refused { tool, unit: unit.to_owned(), messages });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
