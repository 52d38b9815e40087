# make build    build pagefold, in target/release
# make demo     show in a minute how pagefold works, on programs that it starts itself
# make test     run the product's tests, as root; installs the Debian packages they need (cargo test: those that need no rights)
# make ci       run every lane that fits into an hour: lint, test, fuzz-inputs, and the quick tests of the annexes
# make test-all run all lanes but soak and attack: packages, field, the kernel, KVM and Xen, too (takes some hours)
# make soak     run long tests: 100,000 injections, ten minutes of merging and unmerging, a simulated week
# make field    run set-ups that people have reported, with the values that are right, for ten minutes each where time matters
# make attack   inject a million calls into programs that try to be harmed or to escape
# make lint     check formatting, lints and licences
# make fuzz     check every parser on the inputs found so far (fuzz-inputs: only that), and fuzz it for 5 s (fuzz-long: 3 minutes)
# Annexes, each a workspace of its own (see their READMEs):
# make lab      build pagefold-lab, in target/release (lab-test: lint and test it)
# make bench    run the experiments on the real KSM (takes long), with raw samples in target/bench and target/report.html of them
# make records  record real programs into target/records, for pagefold-lab replay (about 8 minutes)
# make fleet    build pagefold-fleet, in target/release (needs Rust 1.94; fleet-test: lint and test it, with Apache Spark and an object store)
# make xen      build pagefold-xen, in target/release (xen-test: lint and test it here; xen-quick: test guests of Xen in an emulated
#               machine, too, where the first time it builds the hypervisor; xen-long: runs that are killed at each step, guests that
#               interfere, a hundred thousand shares; xen-bochs: the unmodified hypervisor with VMX; xen-cost: instructions a page)
# make kernel   build Linux with the series in kernel/ and test it in emulated machines (kernel-quick: a small kernel only;
#               kernel-field: run set-ups that people have reported by merging on request)
# make kernel-cost  measure how many instructions a merged page takes, by ksmd and on request
# make kernel-deb   make Debian packages of that kernel, with Debian's configuration (takes hours)
# make dkms     build the module of kernel/dkms for Debian's stock kernel and test it in an emulated machine (dkms-autoinstall: only
#               its package, with DKMS)
# make kvm      merge guests of KVM in an emulated machine, by ksmd and on request, while they write and check their memory
# make install  install pagefold, its manual pages, completions, systemd units and, unless there is one, its
#               configuration file, below DESTDIR
# make pages    write the manual pages and completions below target/pages
# make deb      build Debian packages in target/deb (deb-test: install, upgrade, remove and purge them in a fresh root)
# make oci      build an image for container engines in target/oci, and check it and the manifests for Kubernetes (oci-test: run it under
#               Podman as the manifest says, beside a pod of a fake node)
# make tarball  build target/pagefold-VERSION-x86_64-linux.tar.gz, with a static program that runs on any Linux
# make systemd-test  test the packages on a Debian with systemd, in an emulated machine (about 20 minutes)
# make release  build all that a release consists of, in target/pagefold-VERSION (release-twice: again in a clone, which must make the
#               same bytes)

CARGO ?= cargo

.PHONY: build oci oci-test demo test ci test-all run-tests-with-ksm run-tests-beside soak field attack lint fuzz fuzz-inputs fuzz-long lab lab-test lab-live bench records \
    fleet fleet-test kernel kernel-quick kernel-field kernel-cost kernel-deb xen xen-test xen-quick xen-long xen-bochs xen-cost dkms dkms-autoinstall kvm install \
    install-files install-documents install-program pages deb deb-test systemd-test tarball release release-twice

build:
	$(CARGO) build --release --locked -p pagefold

demo:
	@scripts/setup demo
	@echo "building pagefold: the first time takes some minutes"
	@$(CARGO) build --release --locked --quiet -p pagefold
	@target/release/pagefold demo

# KSM exists once per machine: tests that use it take a machine-wide lock and run one after the other, mostly waiting. The others run
# beside them: first those in emulated machines and with hostile programs, which take longest.
# None is skipped that could run. They are built with the feature that they need, which plain cargo test leaves out.
LIVE := --workspace --locked --features live
TESTS := $(wildcard crates/*/tests/*.rs)
TESTS_LONG := attack
TESTS_WITH_KSM := $(filter-out $(TESTS_LONG),$(basename $(notdir $(shell grep -lE 'KsmAtRest|mm/ksm' $(TESTS)))))
TESTS_BESIDE := $(filter-out $(TESTS_WITH_KSM) $(TESTS_LONG),$(basename $(notdir $(TESTS))))

test:
	@scripts/setup test
	$(CARGO) build $(LIVE) --bins
	$(CARGO) test $(LIVE) --no-run
	@PAGEFOLD_NO_SKIP=1 $(MAKE) --no-print-directory --jobs 2 run-tests-with-ksm run-tests-beside

# What two cores do within an hour from a cold cache. The fleet takes long to build, and is built and tested while tests of KSM
# mostly wait.
ci: export BESIDE := fleet-test
ci: lint test fuzz-inputs lab-test kernel-quick dkms-autoinstall xen-test

test-all: ci fuzz lab-live xen-quick field deb-test systemd-test oci-test kernel kernel-field dkms kvm

run-tests-with-ksm:
	$(CARGO) test $(LIVE) --no-fail-fast $(TESTS_WITH_KSM:%=--test %)

run-tests-beside:
	nice $(CARGO) test $(LIVE) $(TESTS_LONG:%=--test %)
	nice $(CARGO) test $(LIVE) --no-fail-fast --lib --bins --examples $(TESTS_BESIDE:%=--test %)
	nice $(CARGO) test $(LIVE) --doc
	$(if $(BESIDE),nice $(MAKE) --no-print-directory $(BESIDE))

soak:
	@scripts/setup test
	$(CARGO) test --locked -p pagefold-engine --lib -- --ignored --nocapture
	$(CARGO) test --locked -p pagefold-sim --test week -- --ignored --nocapture
	PAGEFOLD_TORTURE=100000 $(CARGO) test --locked --features live -p pagefold-inject --test torture -- --nocapture
	PAGEFOLD_SOAK_SECONDS=600 $(CARGO) test --locked --features live -p pagefold --test integrity -- --nocapture

field:
	@scripts/setup test
	$(CARGO) build $(LIVE) --bins
	PAGEFOLD_CHARGE_ROUNDS=50 $(CARGO) test --locked --features live -p pagefold-sim --test charge
	PAGEFOLD_FIELD_SECONDS=600 PAGEFOLD_CHARGE_ROUNDS=50 $(CARGO) test --locked --features live -p pagefold --test field --test charge --test selection --test saving -- --include-ignored --nocapture

attack:
	@scripts/setup attack
	PAGEFOLD_ATTACKS=1000000 $(CARGO) test --locked --features live -p pagefold-inject --test attack -- --nocapture
	cd lab && $(CARGO) test --locked --test judges -- --ignored --nocapture --test-threads 1 \
	    $(if $(PAGEFOLD_CRIU),,--skip criu) $(if $(PAGEFOLD_LTP),,--skip ltp)

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(LIVE) --all-targets -- -D warnings
	@! grep -rlPz '\b(if|while) let [^{;|]*&& |&& let ' crates lab xen --include=*.rs || \
	    { echo "Rust 1.86, of Cargo.toml, doesn't know chains of let" >&2; exit 1; }
	@! $(CARGO) tree --locked --package pagefold --edges normal,build,features --invert pagefold-procmem | grep '"faults"' || \
	    { echo "pagefold has points of fault injection, which are for tests only" >&2; exit 1; }
	@command -v cargo-deny >/dev/null || $(CARGO) install --quiet --debug --locked cargo-deny@0.18.3
	$(CARGO) deny --log-level error check licenses bans sources

# The properties of the parsers on the inputs found so far, then on new ones.
fuzz: fuzz-inputs
	@scripts/setup fuzz
	scripts/fuzz 5

fuzz-inputs:
	cd fuzz && $(CARGO) fmt --check
	cd fuzz && $(CARGO) clippy --lib --tests --locked -- -D warnings
	cd fuzz && $(CARGO) test --locked

fuzz-long:
	@scripts/setup fuzz
	scripts/fuzz 180

LAB_LIVE := kernel real_programs
LAB_TESTS := $(filter-out $(LAB_LIVE) judges,$(basename $(notdir $(wildcard lab/tests/*.rs lab/report/tests/*.rs))))

# An annex is in a folder of the same name. Clippy and the tests of one are for it, not for what it depends on.
lab fleet xen:
	cd $@ && $(CARGO) build --release --locked

# The product's programs and victims, that the tests start, are built as the product's own tests build them.
lab-test:
	@scripts/setup lab
	cd lab && $(CARGO) fmt --all --check
	cd lab && $(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	cd lab && $(CARGO) build --workspace --locked --examples
	cd lab && PAGEFOLD_NO_SKIP=1 $(CARGO) test --workspace --locked --lib --bins --examples $(LAB_TESTS:%=--test %)

# The experiments, each once, and simulated ksmd against the real one.
lab-live:
	@scripts/setup lab
	cd lab && PAGEFOLD_NO_SKIP=1 $(CARGO) test --locked $(LAB_LIVE:%=--test %)

fleet-test:
	@scripts/setup fleet
	cd fleet && $(CARGO) fmt --all --check
	cd fleet && PAGEFOLD_NO_SKIP=1 RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/fleet/rustc-with-clippy $(CARGO) test --workspace --locked

xen-test:
	cd xen && $(CARGO) fmt --check
	cd xen && $(CARGO) clippy --all-targets --locked -- -D warnings
	cd xen && $(CARGO) test --locked

bench: lab
	@scripts/setup bench
	target/release/pagefold-lab bench --output target/bench; missed=$$?; target/release/pagefold-lab report target/bench; exit $$missed

records: lab
	@scripts/setup bench
	lab/scripts/records

kernel:
	scripts/kernel full

kernel-quick kernel-field kernel-cost kernel-deb: kernel-%:
	scripts/kernel $*

xen-quick: xen-test

xen-quick xen-long xen-bochs xen-cost: xen-%:
	scripts/xen $*

dkms:
	scripts/dkms full

dkms-autoinstall:
	scripts/dkms autoinstall

kvm:
	scripts/kvm

pages:
	rm -rf target/pages
	$(CARGO) run --quiet --locked -p pagefold --example pages -- target/pages

install: pages
	$(CARGO) build --release --locked -p pagefold
	$(MAKE) --no-print-directory install-files

# What has been built, with the programs of BIN.
BIN ?= target/release
PREFIX ?= /usr/local
UNITS ?= $(PREFIX)/lib/systemd/system
PROGRAM ?= pagefold

install-program:
	@! grep -qF PAGEFOLD_FAULT $(BIN)/$(PROGRAM) || { echo "$(BIN)/$(PROGRAM) was built for tests; run make build" >&2; exit 1; }
	install -D -t $(DESTDIR)$(PREFIX)/bin $(BIN)/$(PROGRAM)
	cp -r target/pages/$(PROGRAM)/share $(DESTDIR)$(PREFIX)

# Links to files that we don't install become plain words.
DOCUMENTS := $(DESTDIR)$(PREFIX)/share/doc/pagefold

install-documents:
	install -D -m 644 -t $(DOCUMENTS) README.md SECURITY.md CHANGELOG.md
	install -D -m 644 -t $(DOCUMENTS)/docs $(filter-out docs/figures.md,$(wildcard docs/*.md)) docs/*.svg
	sed -E -i 's,\[([^]]*)\]\((\.\./)?(CONTRIBUTING|docs/figures|crates|fleet|fuzz|kernel|lab|packaging|xen)[^)]*\),\1,g' \
	    $(DOCUMENTS)/*.md $(DOCUMENTS)/docs/*.md

install-files: install-program install-documents
	install -D -m 644 -t $(DESTDIR)$(UNITS) packaging/systemd/*
	sed -i 's,/usr/local/bin/,$(PREFIX)/bin/,' $(patsubst packaging/systemd/%,$(DESTDIR)$(UNITS)/%,$(wildcard packaging/systemd/*))
	install -D -m 644 -t $(DOCUMENTS)/examples/prometheus packaging/prometheus/*
	install -D -m 644 -t $(DOCUMENTS)/examples/grafana packaging/grafana/*
	[ -e $(DESTDIR)/etc/pagefold/pagefold.toml ] || \
	    install -D -m 644 packaging/pagefold.toml $(DESTDIR)/etc/pagefold/pagefold.toml

# What we ship names no directory of this machine, and the same commit makes the same bytes in any directory. Cargo's hash of a crate outside
# of the workspace, as all of ours are for the fleet, contains its directory, so we build the fleet at a fixed place.
CARGO_HOME ?= $(HOME)/.cargo
SHIPPED := RUSTFLAGS="--remap-path-prefix=$(CURDIR)=/pagefold --remap-path-prefix=/mnt=/pagefold --remap-path-prefix=$(CARGO_HOME)=/cargo" $(CARGO)

deb: pages
	@scripts/setup package
	$(SHIPPED) build --profile profiling --locked -p pagefold
	$(if $(filter pkg.pagefold.fleet,$(DEB_BUILD_PROFILES)),unshare --map-root-user --mount sh -c 'mount --bind "$(CURDIR)" /mnt && \
	    cd /mnt/fleet && $(SHIPPED) build --release --locked && \
	    $(SHIPPED) run --release --quiet --locked --example pages -- ../target/pages')
	scripts/deb
	lintian --fail-on error,warning target/deb/*.deb

deb-test: deb
	scripts/package-test

systemd-test: deb
	@scripts/setup systemd
	scripts/systemd-test

MUSL := x86_64-unknown-linux-musl
TARBALL = pagefold-$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)-x86_64-linux

tarball: pages
	@scripts/setup tarball
	$(SHIPPED) build --release --locked -p pagefold --target $(MUSL)
	rm -rf target/tarball
	$(MAKE) --no-print-directory install-files BIN=target/$(MUSL)/release DESTDIR=target/tarball/$(TARBALL)
	cp LICENSE-* target/tarball/$(TARBALL)/usr/local/share/doc/pagefold
	tar -C target/tarball --owner=0 --group=0 --numeric-owner --mode=go-w --sort=name --mtime=@$$(git log -1 --format=%ct) -c $(TARBALL) | \
	    gzip -n -9 >target/$(TARBALL).tar.gz
	scripts/tarball-test target/$(TARBALL).tar.gz

oci:
	@scripts/setup oci
	@scripts/setup tarball
	$(SHIPPED) build --release --locked -p pagefold --target $(MUSL)
	scripts/oci target/$(MUSL)/release/pagefold

oci-test: oci
	@scripts/setup oci-test
	scripts/oci-test

# Only a release has the package of pagefold-fleet, because DataFusion takes long to build.
release: export DEB_BUILD_PROFILES := pkg.pagefold.fleet
release: deb tarball oci
	@scripts/setup release
	scripts/release

release-twice: release
	scripts/release twice
