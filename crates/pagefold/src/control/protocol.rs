//! The protocol of the control socket: a line of JSON for each request, and one for its answer.

use pagefold_engine::governor::Governor;
use pagefold_host::scope::workload::WorkloadKind;
use pagefold_host::scope::{ScopeError, ScopeSpec, Selector, user_id};
use pagefold_text::escape::printable;
use pagefold_text::exit::{self, Exit};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

pub const PATH: &str = "/run/pagefold/control.sock";
/// The schema of requests, and of answers without a schema of their own.
pub const SCHEMA: &str = "pagefold.control/1";
/// Members of this group may ask for the status, but nothing else.
pub const GROUP: &str = "pagefold";
/// The beginning of the message to a user who isn't permitted to send a request.
pub const ONLY_ROOT: &str = "only root may send";
/// The longest request, in bytes with its newline: enough for thousands of pids.
pub const REQUEST_MOST: usize = 65_536;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "lowercase")]
pub enum Request {
    /// Answered by `pagefold.status/1`.
    Status,
    /// Answered by `pagefold.explain/1`.
    Explain {
        pid: i32,
    },
    /// `Explain` for several processes. Answered by `pagefold.explain-workload/1`.
    Workload(Selectors),
    /// `Explain` for a Xen guest, by name or number.
    Guest {
        guest: String,
    },
    /// Changes the governor. The daemon answers this, `Pause` and `Resume` with [`ControlState`].
    Governor {
        name: String,
    },
    Pause,
    Resume,
    /// Excludes processes: unmerges them, and doesn't merge them again. Answered by `pagefold.unmerge/1`.
    Unmerge(Selectors),
    /// Includes processes that were excluded. Answered by `pagefold.include/1`.
    Include(Selectors),
    /// Reads the configuration files again. Answered by [`Reloaded`].
    Reload,
}

/// The processes that a request is about.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Selectors {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pids: Vec<i32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cgroups: Vec<String>,
    /// Users by number, since names may differ in the daemon's container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exes: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub units: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vms: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<String>,
    pub all: bool,
}

impl Selectors {
    /// Converts a scope to the selectors of a request.
    ///
    /// # Errors
    /// A user doesn't exist.
    pub fn of(spec: &ScopeSpec) -> Result<Self, ScopeError> {
        let mut selectors = Self::default();
        for selector in &spec.0 {
            match selector {
                Selector::Pid(pid) => selectors.pids.push(*pid),
                Selector::Cgroup(path) => selectors.cgroups.push(path.to_string_lossy().into_owned()),
                Selector::User(user) => selectors.users.push(user_id(user)?),
                Selector::Exe(exe) => selectors.exes.push(exe.clone()),
                Selector::Workload(workload) => match workload.kind {
                    WorkloadKind::Unit => &mut selectors.units,
                    WorkloadKind::Vm => &mut selectors.vms,
                    WorkloadKind::Container => &mut selectors.containers,
                    WorkloadKind::Pod => &mut selectors.pods,
                }
                .push(workload.name.clone()),
                Selector::All => selectors.all = true,
            }
        }
        Ok(selectors)
    }

    pub fn spec(&self) -> ScopeSpec {
        let users: Vec<String> = self.users.iter().map(u32::to_string).collect();
        let names = [
            ("cgroup", &*self.cgroups),
            ("user", &users),
            ("exe", &self.exes),
            ("unit", &self.units),
            ("vm", &self.vms),
            ("container", &self.containers),
            ("pod", &self.pods),
        ];
        ScopeSpec::of(&self.pids, &names, self.all)
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Message {
    schema: String,
    #[serde(flatten)]
    request: Request,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ControlState {
    pub schema: String,
    pub pid: u32,
    pub governor: Governor,
    pub in_force: Governor,
    pub allowed_share: f64,
    pub paused: bool,
}

/// The settings in force after they were read again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    pub schema: String,
    pub file: PathBuf,
    pub scope: String,
}

/// The answer to a request that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The problem and the advice, with a semicolon between them.
    pub error: String,
    /// The exit code for the command that sent the request.
    #[serde(default = "failure")]
    pub code: u8,
}

fn failure() -> u8 {
    exit::FAILURE
}

impl From<Exit> for Refusal {
    fn from(exit: Exit) -> Self {
        Self { error: exit.line, code: exit.code }
    }
}

impl Request {
    /// The request as a line, with its newline.
    pub fn line(&self) -> String {
        let message = Message { schema: SCHEMA.to_owned(), request: self.clone() };
        // Strings and numbers can always be encoded.
        serde_json::to_string(&message).unwrap_or_default() + "\n"
    }

    /// Parses a line.
    ///
    /// # Errors
    /// The line is malformed, or of another version. The error has the problem, a semicolon, and the advice.
    pub fn parse(line: &[u8]) -> Result<Self, String> {
        let message: Message = serde_json::from_slice(line)
            // Escape the error, since it may quote the request.
            .map_err(|error| printable(error.to_string().as_bytes()))
            .map_err(|error| format!("the request is malformed: {error}; see pagefold-json(5)"))?;
        if message.schema != SCHEMA {
            return Err(format!("the request is not of schema {SCHEMA}; use a pagefold of the same version"));
        }
        if let Request::Governor { name } = &message.request {
            name.parse::<Governor>().map_err(|error| error.to_string())?;
        }
        Ok(message.request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_survives_a_round_trip() {
        let all = [
            Request::Status,
            Request::Explain { pid: 7 },
            Request::Guest { guest: "web".into() },
            Request::Workload(Selectors { units: vec!["nginx".into()], ..Selectors::default() }),
            Request::Governor { name: "low".into() },
            Request::Pause,
            Request::Resume,
            Request::Reload,
            Request::Unmerge(Selectors { all: true, ..Selectors::default() }),
            Request::Include(Selectors {
                pids: vec![1, 2],
                cgroups: vec!["/a b".into()],
                users: vec![33],
                exes: vec!["redis".into()],
                units: vec!["nginx.service".into()],
                vms: vec!["web1".into()],
                containers: vec!["3f0c".into()],
                pods: vec!["6c2f".into()],
                all: false,
            }),
        ];
        for request in all {
            assert_eq!(Request::parse(request.line().trim_end().as_bytes()).as_ref(), Ok(&request));
        }
        assert_eq!(Request::Status.line(), "{\"schema\":\"pagefold.control/1\",\"request\":\"status\"}\n");
    }

    #[test]
    fn malformed_requests_are_refused_with_the_reason() {
        for (line, says) in [
            ("", "malformed"),
            ("hello", "malformed"),
            ("[1]", "malformed"),
            (r#"{"request":"status"}"#, "schema"),
            (r#"{"schema":"pagefold.control/2","request":"status"}"#, "not of schema"),
            (r#"{"schema":"pagefold.control/1"}"#, "request"),
            (r#"{"schema":"pagefold.control/1","request":"dance"}"#, "dance"),
            (r#"{"schema":"pagefold.control/1","request":"a\nb\u001b"}"#, "a\\nb\\u{1b}"),
            (r#"{"schema":"pagefold.control/1","request":"governor","name":"a\nb"}"#, "a\\nb"),
            (r#"{"schema":"pagefold.control/1","request":"explain"}"#, "pid"),
            (r#"{"schema":"pagefold.control/1","request":"explain","pid":"one"}"#, "malformed"),
            (r#"{"schema":"pagefold.control/1","request":"explain","pid":99999999999}"#, "malformed"),
            (r#"{"schema":"pagefold.control/1","request":"unmerge","pids":["all"]}"#, "malformed"),
            (
                r#"{"schema":"pagefold.control/1","request":"governor","name":"turbo"}"#,
                "full, medium, low, quiet or auto",
            ),
        ] {
            let error = Request::parse(line.as_bytes()).unwrap_err();
            assert!(error.contains(says) && !error.contains('\n'), "{line}: {error}");
        }
        assert!(Request::parse("[".repeat(4000).as_bytes()).is_err());
    }
}
