//! A fleet's sketches as files, as the daemons of its hosts would write them.

use super::FleetOptions;
use super::mix::Mix;
use super::world::{CPU_EACH, PLACES, World, contents};
use anyhow::{Context, Result};
use pagefold_engine::units::{PAGE_BYTES, count};
use pagefold_sketch::{FleetKey, Kind, Row};
use std::io::Cursor;
use std::path::Path;

/// Writes a file for each host, with the time `now_us`. We make hosts one after the other: a large fleet doesn't fit
/// into memory.
pub fn write(dir: &Path, mix: &Mix, options: &FleetOptions, now_us: u64, show: &dyn Fn(u32)) -> Result<u64> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}; choose another directory", dir.display()))?;
    let key = FleetKey::new([7; 32]).id();
    let mut bytes = 0;
    for host in 0..options.hosts {
        // Each host has its own seed, and its instances have numbers that no other host's have.
        let of_host = FleetOptions { hosts: 1, seed: options.seed ^ u64::from(host) << 32, ..*options };
        let world = World::numbered_from(mix, &of_host, u64::from(host) * u64::from(options.per_host));
        let memory = 2 * u64::from(options.per_host) * largest(mix) * PAGE_BYTES;
        let rows = world.instances.iter().zip(&world.sketches).map(|(instance, sketch)| {
            let pages = count(contents(mix, *instance).count());
            Row {
                host: format!("host-{host:05}"),
                key,
                kind: Kind::Pod,
                workload: format!("{}-{}", mix.kinds[instance.kind].name, instance.number),
                domain: "default".into(),
                time_us: now_us,
                since_us: now_us - 3_600_000_000,
                anonymous_bytes: pages * PAGE_BYTES,
                read_bytes: pages * PAGE_BYTES,
                pages: [pages, 0, 0, 0, 0],
                cpu_millicores: CPU_EACH,
                host_memory_bytes: memory,
                host_cpu_millicores: u64::from(options.per_host) * PLACES.0 / PLACES.1 * CPU_EACH * 5 / 4,
                ..Row::blank(sketch.clone())
            }
        });
        let rows: Vec<Row> = rows.collect();
        let written = pagefold_sketch::write(Cursor::new(Vec::new()), &rows)?.into_inner();
        let path = dir.join(format!("host-{host:05}.parquet"));
        std::fs::write(&path, &written)
            .with_context(|| format!("cannot write {}; choose a directory with more space", path.display()))?;
        bytes += count(written.len());
        show(host + 1);
    }
    Ok(bytes)
}

fn largest(mix: &Mix) -> u64 {
    mix.kinds.iter().map(|kind| count(kind.common.len() + kind.own)).max().unwrap_or(0)
}
