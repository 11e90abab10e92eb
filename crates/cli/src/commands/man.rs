//! `metaltail man`: the manual page, drawn from the declaration.

use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::args::Cli;
use crate::exit::{Failure, Kind};
use crate::output;

/// Prints the page in roff: the program, then each command with its own options.
///
/// # Errors
/// Standard output cannot be written.
pub fn execute() -> Result<(), Failure> {
    let mut page = Vec::new();
    render(&mut page).map_err(|error| Failure::from_error(Kind::Failed, &error))?;
    output::print(&String::from_utf8_lossy(&page))
}

fn render(page: &mut Vec<u8>) -> std::io::Result<()> {
    let mut command = Cli::command();
    command.build();
    Man::new(command.clone()).render(page)?;
    command.get_subcommands().filter(|sub| sub.get_name() != "help").try_for_each(|sub| section(sub, page))
}

/// One command's part of the page, and those of its subcommands.
fn section(command: &Command, page: &mut Vec<u8>) -> std::io::Result<()> {
    let title = command.get_bin_name().unwrap_or(command.get_name()).to_uppercase();
    page.extend_from_slice(format!(".SH {title}\n").as_bytes());
    let man = Man::new(command.clone());
    man.render_synopsis_section(page)?;
    man.render_description_section(page)?;
    man.render_options_section(page)?;
    command.get_subcommands().filter(|sub| sub.get_name() != "help").try_for_each(|sub| section(sub, page))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_page_names_every_command() {
        let mut page = Vec::new();
        super::render(&mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        for title in ["METALTAIL RUN", "METALTAIL BENCH KERNELS", "METALTAIL SCORE"] {
            assert!(page.contains(title), "{title}");
        }
        assert!(page.contains("prefill\\-chunk"));
    }
}
