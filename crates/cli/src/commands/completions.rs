//! `metaltail completions`: a shell's completion script, drawn from the declaration.

use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs};
use crate::exit::Failure;
use crate::output;

/// Prints the script.
///
/// # Errors
/// Standard output cannot be written.
pub fn execute(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "metaltail", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}
