//! Examples of each command, for `--help` and the manual pages: a line to copy, and below it what it does.
//!
//! If a command line lacks something that the command needs, the error message shows the first example that has it.

pub const SCAN: &str = "\
Examples:
  pagefold scan
      The whole host, by program and by workload
  pagefold scan redis-server 4711
      All processes of a program, and one more process
  pagefold scan --unit nginx --exact --html scan.html
      A service, reading every page; also writes a web page";

pub const SKETCH: &str = "\
Examples:
  pagefold sketch --all --key /etc/pagefold/fleet.key -o host.parquet
      All workloads of this host, for pagefold-fleet";

pub const RUN: &str = "\
Examples:
  pagefold run redis-server
      Merge all processes of a program, also those that start later, until Ctrl-C
  pagefold run --unit nginx --unit php-fpm --governor low
      Two services, with up to 20 % of a core
  pagefold run --vm web1 --vm web2 --dry-run --for 60
      See for a minute what would be merged
  pagefold run --config /etc/pagefold/pagefold.toml
      Run as the service does";

pub const ENABLE: &str = "\
Examples:
  pagefold enable redis-server
      All processes of a program
  pagefold enable --unit nginx --vm web1
      A service and a guest";

pub const DISABLE: &str = "\
Examples:
  pagefold disable --unit nginx
      Undo the same with enable";

pub const STATUS: &str = "\
Examples:
  pagefold status
      What is saved, and what it costs
  pagefold status --json
      The same as JSON, for scripts: see pagefold-json(5)
  pagefold status --watch
      The same every 5 s, until interrupted";

pub const TOP: &str = "\
Examples:
  pagefold top
      What is saved now; h shows all keys
  pagefold top --since 2h
      Begin with the savings of the last two hours
  pagefold top --once
      The programs as text, for a script
  pagefold top --html top.html
      A web page about the last day";

pub const HISTORY: &str = "\
Examples:
  pagefold history > savings.csv
      The last day, for a spreadsheet
  pagefold history --since 30d --json
      All data that the history has";

pub const EXPLAIN: &str = "\
Examples:
  pagefold explain 4711
      Each region of process 4711
  pagefold explain --unit nginx
      A service: its processes, sums, and the next step for its memory, by reason";

pub const GOVERNOR: &str = "\
Examples:
  pagefold governor quiet
      Up to 1 % of a core
  pagefold governor auto
      Up to 20 %, and more as memory gets scarce";

pub const EXEC: &str = "\
Examples:
  pagefold exec -- ./worker
      Start a program whose memory KSM may merge";

pub const EXCLUDE: &str = "\
Examples:
  pagefold exclude redis-server
      All processes of a program, also those that start later
  pagefold exclude --container web1
      A container";

pub const UNMERGE: &str = "\
Examples:
  pagefold unmerge redis-server
      All processes of a program
  pagefold unmerge --unit nginx
      A service";

pub const INCLUDE: &str = "\
Examples:
  pagefold include --unit nginx
      Let the daemon merge a service again";

pub const DOCTOR: &str = "\
Examples:
  pagefold doctor
      Show what is wrong
  pagefold doctor --verbose
      Show all checks
  pagefold doctor --fix
      Restore the KSM settings that a killed run left changed";

pub const CONFIG: &str = "\
Examples:
  pagefold config check
      Check /etc/pagefold/pagefold.toml, and the files in pagefold.toml.d
  pagefold config show
      Show each setting, and where it comes from";
