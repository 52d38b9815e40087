//! Sketches in an object store, which is a local server that speaks S3.

use crate::files::{NOW, fleet, json, text, two_kinds};
use crate::skip::skip;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The Python with the modules that the fleet's tests need, if `scripts/setup` has made it.
pub fn python() -> Option<PathBuf> {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/fleet-python/bin/python");
    python.exists().then_some(python)
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves a bucket with the files of a directory, on a port that it prints.
const SERVE: &str = "
import pathlib, sys, boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
client = boto3.client('s3', endpoint_url=f'http://127.0.0.1:{port}', region_name='us-east-1',
    aws_access_key_id='id', aws_secret_access_key='secret')
client.create_bucket(Bucket='sketches')
for file in pathlib.Path(sys.argv[1]).iterdir():
    client.put_object(Bucket='sketches', Key=f'today/{file.name}', Body=file.read_bytes())
print(port, flush=True)
sys.stdin.read()
";

#[test]
fn an_object_store_gives_the_same_answer_as_a_directory() {
    let Some(python) = python() else { return skip("no Python with moto: scripts/setup fleet makes one") };
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    let mut server = Command::new(python);
    server.args(["-c", SERVE, dir.path().to_str().unwrap()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut server = Server(server.stderr(Stdio::null()).spawn().unwrap());
    let mut port = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut port).unwrap();
    let report = |place: &str| {
        let mut command = fleet(&["report", place, "--at", NOW, "--json"]);
        command.env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{}", port.trim())).env("AWS_ALLOW_HTTP", "true");
        command.env("AWS_ACCESS_KEY_ID", "id").env("AWS_SECRET_ACCESS_KEY", "secret").env("AWS_REGION", "us-east-1");
        command.output().unwrap()
    };
    let found = report("s3://sketches/today");
    assert!(found.status.success(), "{}", text(&found.stderr));
    let found: Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!(found, json("report", dir.path(), &[]));
    let missing = report("s3://nowhere/today");
    let error = crate::files::fails(&missing, 1);
    assert!(error.contains("cannot list s3://nowhere"), "{error}");
}
