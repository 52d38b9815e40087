# make demo   the whole story in a minute, on programs it starts itself
# make test   every test; installs what they need from Debian's packages
# make lint   formatting, lints, licences
# make bench  the experiments behind the figures in docs/measurements.md (long)

CARGO ?= cargo

.PHONY: build demo test unit lint bench install

build:
	$(CARGO) build --release --locked

demo:
	@scripts/setup demo
	@$(CARGO) build --release --locked --quiet
	@target/release/pagefold demo

# KSM is one global resource: tests that use it take one lock and run one after the other.
test:
	@scripts/setup test
	$(CARGO) test --workspace --locked

unit:
	$(CARGO) test --workspace --locked --lib

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	@command -v cargo-deny >/dev/null || $(CARGO) install --quiet --locked cargo-deny@0.18.3
	$(CARGO) deny --log-level error check licenses bans sources

bench: build
	@scripts/setup bench
	target/release/pagefold bench

install: build
	install -D target/release/pagefold $(DESTDIR)/usr/local/bin/pagefold
