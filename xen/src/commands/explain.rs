//! `pagefold-xen explain`: how the daemon judges the memory of a guest.

use pagefold::commands::explain;

#[derive(Clone, Debug, clap::Args)]
pub struct ExplainArgs {
    /// The guest to explain (name or number)
    #[arg(long, value_name = "GUEST")]
    xen_domain: String,
    /// Print the explanation as JSON (schema pagefold.explain/1)
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ExplainArgs) -> anyhow::Result<u8> {
    explain::run_of_guest(&args.xen_domain, args.json)
}
