//! Metrics for Prometheus: served over HTTP, written to a file, or both. pagefold-metrics(5) describes them.
//!
//! Every metric is computed from the status ([`families`]), so the two agree. The server and the file each have a
//! thread that asks the main loop for the facts as the control socket does: no client and no disk delays the main loop.

pub mod families;
mod file;
mod http;
mod text;

use crate::background::Background;
use crate::commands::status::Status;
use crate::config::options::{METRICS_INTERVAL, Options};
use crate::control::cached::Cached;
use crate::control::queue::RequestSender;
use anyhow::{Context, Result};
use file::MetricsFile;
use pagefold_host::os::sockets;
use pagefold_text::exit::{self, Exit};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetricsSettings {
    pub address: Option<SocketAddr>,
    pub file: Option<PathBuf>,
    pub interval: Duration,
}

impl MetricsSettings {
    pub fn of(options: &Options) -> Self {
        Self {
            address: options.metrics,
            file: options.metrics_file.clone(),
            interval: options.metrics_interval.unwrap_or(METRICS_INTERVAL),
        }
    }
}

/// The sockets and the file, ready for the run to start.
#[derive(Debug)]
pub struct Metrics {
    listeners: Vec<TcpListener>,
    file: Option<MetricsFile>,
    interval: Duration,
}

impl Metrics {
    /// Takes the sockets that the service manager has passed. Call this before anything opens a file.
    pub fn passed() -> Result<Vec<TcpListener>, Exit> {
        sockets::take_passed().map_err(|error| {
            let line = format!(
                "cannot serve metrics at the sockets from the service manager: {error}; see pagefold-metrics.socket"
            );
            Exit::new(exit::USAGE, line)
        })
    }

    /// Opens the address and the file that the settings name, in addition to the sockets that were passed.
    ///
    /// # Errors
    /// We can't listen on the address, or can't write the file safely.
    pub fn open(settings: &MetricsSettings, passed: Vec<TcpListener>) -> Result<Self> {
        let mut listeners = passed;
        if let Some(address) = settings.address {
            listeners.push(TcpListener::bind(address).map_err(|error| refused(address, &error))?);
        }
        for listener in &listeners {
            listener.set_nonblocking(true).context("cannot set up the socket for metrics")?;
        }
        let file = settings.file.as_deref().map(MetricsFile::open).transpose()?;
        Ok(Self { listeners, file, interval: settings.interval })
    }

    /// Starts the server and the thread that writes the file. Dropping the result removes the file.
    pub fn start(self, requests: &RequestSender) -> Option<Background<()>> {
        if !self.listeners.is_empty() {
            let mut page = page(requests);
            let listeners = self.listeners;
            let thread = thread::Builder::new().name("metrics".into());
            if let Err(error) = thread.spawn(move || http::serve(&listeners, move || page.get())) {
                complain!("metrics are not served: cannot start the thread for them: {error}");
            }
        }
        let mut page = page(requests);
        let started = self.file?.start(self.interval, move || page.get());
        started
            .inspect_err(|error| complain!("metrics are not written: cannot start the thread for them: {error}"))
            .ok()
    }
}

fn page(requests: &RequestSender) -> Cached {
    Cached::new(requests.clone(), |facts| Ok(families::page(&Status::of(facts))))
}

fn refused(address: SocketAddr, error: &std::io::Error) -> Exit {
    let (code, advice) = match error.kind() {
        ErrorKind::AddrInUse => (exit::FAILURE, "choose another port, or end the program that uses it"),
        ErrorKind::AddrNotAvailable => (exit::FAILURE, "choose an address of this machine"),
        ErrorKind::PermissionDenied => (exit::NOT_PERMITTED, "choose a port from 1024 on"),
        // The service's sandbox may have no network.
        _ => (exit::FAILURE, "in the service, enable pagefold-metrics.socket instead"),
    };
    Exit::new(code, format!("cannot serve metrics at {address}: {error}; {advice}"))
}
