//! A day of churn. Every hour some workloads end and others begin on random hosts; then we carry out a plan with few
//! moves.

use super::FleetOptions;
use super::mix::Mix;
use super::world::{Instance, World, exact_saving};
use pagefold_engine::units::{count, index};
use pagefold_planner::contents::Contents;
use pagefold_planner::plan;
use serde::Serialize;

/// One workload in this many is replaced each hour.
const REPLACED_IN: u64 = 25;
/// At most one workload in this many moves each hour.
const MOVED_IN: u64 = 10;

/// Pages saved on average, with and without plans.
#[derive(Clone, Debug, Serialize)]
pub struct Day {
    pub hours: u32,
    pub replaced: u64,
    pub moves: u64,
    pub random: f64,
    pub planned: f64,
    /// Pages saved with plans, hour by hour.
    pub by_hour: Vec<u64>,
}

/// Simulates the same day with and without plans.
pub fn day(mix: &Mix, options: &FleetOptions, show: &dyn Fn(&str)) -> Day {
    let mut day = Day { hours: options.hours, replaced: 0, moves: 0, random: 0.0, planned: 0.0, by_hour: Vec::new() };
    let mut left = World::new(mix, options);
    let mut planned = World::new(mix, options);
    let each_hour = count(left.instances.len()) / REPLACED_IN;
    for hour in 0..options.hours {
        show(&format!("hour {} of {}", hour + 1, options.hours));
        for _ in 0..each_hour {
            // The same workloads end and begin in both; the newcomer starts where the old one ended.
            let at = usize::try_from(left.random.below(count(left.instances.len()))).unwrap_or(0);
            let _ = planned.random.next();
            let newcomer = left.make(left.instances[at].host);
            let twin = planned.make(planned.instances[at].host);
            left.replace(at, newcomer);
            planned.replace(at, Instance { kind: newcomer.kind, ..twin });
            day.replaced += 1;
        }
        let fleet = planned.fleet();
        let contents = Contents::of(&fleet);
        let made = plan(&fleet, &contents, count(fleet.units.len()) / MOVED_IN);
        day.moves += made.moves;
        for (instance, host) in planned.instances.iter_mut().zip(&made.places) {
            instance.host = host.0;
        }
        let saved = saved(&planned);
        day.by_hour.push(saved);
        day.planned += saved as f64 / f64::from(options.hours);
        day.random += self::saved(&left) as f64 / f64::from(options.hours);
    }
    day
}

fn saved(world: &World<'_>) -> u64 {
    let mut on = vec![Vec::new(); index(world.options.hosts)];
    for (at, instance) in world.instances.iter().enumerate() {
        on[index(instance.host)].push(at);
    }
    on.iter().map(|workloads| exact_saving(world, workloads)).sum()
}
