//! Opens the pages of reports in a browser.

use crate::skip::skip;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A browser without a screen, with a profile of its own.
pub struct Browser {
    dir: tempfile::TempDir,
}

impl Browser {
    pub fn new() -> Option<Self> {
        let found = Command::new("chromium").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if found.is_err() {
            skip("no chromium: scripts/setup installs it");
            return None;
        }
        Some(Self { dir: tempfile::tempdir().unwrap() })
    }

    /// Opens a page. Returns the browser's output, after checking that nothing was refused or failed.
    #[track_caller]
    fn open(&self, page: &Path, more: &[&str]) -> String {
        let profile = format!("--user-data-dir={}", self.dir.path().join("profile").display());
        let mut command = Command::new("timeout");
        command.args(["60", "chromium", "--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]);
        // Root can't use the sandbox. We also cut the network off, because a page mustn't need one.
        command.args(["--no-sandbox", "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND", &profile]);
        let output =
            command.args(more).arg(format!("file://{}", page.display())).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        // The console has messages for everything that a page's policy refuses, and for errors in the page.
        assert!(!said.contains("CONSOLE"), "{said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the page as the browser understands it.
    #[track_caller]
    pub fn document(&self, page: &Path) -> String {
        let document = self.open(page, &["--dump-dom"]);
        assert!(document.contains("default-src 'none'") && document.ends_with("</html>\n"), "{document}");
        for foreign in ["<script", "<img", "<iframe", "<link", "NaN"] {
            assert!(!document.contains(foreign), "{foreign} in {document}");
        }
        document
    }

    /// Checks that the page and its tables fit into 400 pixels. The page forbids scripts, so another page around it has
    /// the script that measures.
    #[track_caller]
    pub fn assert_narrow(&self, page: &Path) {
        let around = self.dir.path().join("around.html");
        let text = format!(
            "<title>unknown</title><iframe src='file://{}' style='width: 400px; height: 2200px; border: 0'></iframe>
            <script>onload = () => {{
                const inside = document.querySelector('iframe').contentDocument;
                const ends = [...inside.querySelectorAll('table')].map(table => table.getBoundingClientRect().right);
                document.title = Math.max(inside.documentElement.scrollWidth, ...ends);
            }}</script>",
            page.display()
        );
        fs::write(&around, text).unwrap();
        let document = self.open(&around, &["--allow-file-access-from-files", "--dump-dom"]);
        let width = document.split("<title>").nth(1).and_then(|rest| rest.split_once('<')).unwrap().0;
        let width: f64 = width.parse().unwrap_or_else(|_| panic!("{width}: {document}"));
        assert!(width <= 400.0, "the page is {width} pixels wide");
    }

    /// Takes a picture for each width and colour scheme. Keeps them in PAGEFOLD_PAGES_KEEP if that is set.
    #[track_caller]
    pub fn pictures(&self, page: &Path) {
        let kept = std::env::var_os("PAGEFOLD_PAGES_KEEP").map(PathBuf::from);
        let name = page.file_stem().unwrap().to_str().unwrap();
        let widths = [400, 800, 1400];
        for (width, scheme) in widths.into_iter().flat_map(|width| [(width, 0), (width, 1)]) {
            let file = format!("{name}-{width}-{scheme}.png");
            let file = kept.as_deref().unwrap_or(self.dir.path()).join(file);
            let scheme = format!("--blink-settings=preferredColorScheme={scheme}");
            let size = format!("--window-size={width},2200");
            let shot = format!("--screenshot={}", file.display());
            self.open(page, &[&size, &scheme, &shot]);
            // A picture of an empty page takes only a few kilobytes.
            assert!(fs::metadata(&file).unwrap().len() > 30_000, "{}", file.display());
        }
    }
}
