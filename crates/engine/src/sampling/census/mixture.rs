//! Estimates how often contents occur in memory from how often they occur in a sample.
//!
//! If `m` runs hold a content and we sample each with probability `f`, a sampled run meets `Binomial(m - 1, f)` others.
//! We find the shares of the multiplicities `m` by nonparametric maximum likelihood: expectation maximisation over a
//! grid of multiplicities, accelerated by SQUAREM (Varadhan and Roland, 2008). We assume no distribution, so pairs,
//! triples and contents with thousands of copies may mix.

/// We don't model a content that we saw `j` times if `j` is at least this: then `m = j / f` is known to within a fifth,
/// and the saving, `1 - 1/m`, to much less than one per cent.
pub(super) const FREQUENT: usize = 30;

/// Sampled units (pages, or runs that hold a content) by how often we saw their content.
pub(super) type Histogram = [f64; FREQUENT];

/// The expected values for a unit, by how often we saw its content.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posterior {
    /// `E[1 - 1/m]`: the part of the unit that merging saves.
    pub saved: Histogram,
    /// `E[1/m, m > 1]`: the unit's part in a shared content that's left after merging.
    pub content: Histogram,
}

impl Posterior {
    pub fn saving(&self, histogram: &Histogram) -> f64 {
        product(histogram, &self.saved)
    }

    /// The number of shared contents that are left after merging.
    pub fn contents(&self, histogram: &Histogram) -> f64 {
        product(histogram, &self.content)
    }
}

/// Multiplies two histograms column by column, and adds up the products.
fn product(histogram: &Histogram, expected: &Histogram) -> f64 {
    let mut sum = 0.0;
    for (units, expected) in histogram.iter().zip(expected) {
        sum += units * expected;
    }
    sum
}

/// The probabilities of being seen, for one sampled fraction.
pub(super) struct Mixture {
    multiplicity: Vec<f64>,
    /// For each multiplicity, the probability that we see a sampled unit's content `j` times. Index 0 is unused.
    chance: Vec<Histogram>,
}

impl Mixture {
    /// Prepares the fit for a sampled fraction, 0 < f < 1.
    pub fn new(fraction: f64) -> Self {
        let fraction = fraction.clamp(1e-6, 1.0 - 1e-9);
        let most = 2.0 * FREQUENT as f64 / fraction;
        let mut mixture = Self { multiplicity: Vec::new(), chance: Vec::new() };
        let mut m = 1.0_f64;
        while m <= most {
            let mut chance = [0.0; FREQUENT];
            // Binomial(m-1, f) at 0, 1, 2, ...: the first by logarithms, the others by recurrence.
            let mut p = ((m - 1.0) * (-fraction).ln_1p()).exp();
            for (others, slot) in chance.iter_mut().skip(1).enumerate() {
                *slot = p;
                let others = others as f64;
                p *= ((m - 1.0 - others).max(0.0) / (others + 1.0)) * fraction / (1.0 - fraction);
            }
            // We count frequent contents separately, so these probabilities are for contents that aren't frequent.
            let seldom: f64 = chance.iter().sum();
            if seldom > 1e-6 {
                for p in &mut chance {
                    *p /= seldom;
                }
                mixture.multiplicity.push(m);
                mixture.chance.push(chance);
            }
            m = if m < 24.0 { m + 1.0 } else { (m * 1.15).ceil() };
        }
        mixture
    }

    /// The most likely share of each multiplicity. We start from equal shares.
    pub fn fit(&self, histogram: &Histogram) -> Vec<f64> {
        const ROUNDS: usize = 120;
        let flat = vec![1.0 / self.multiplicity.len() as f64; self.multiplicity.len()];
        if histogram.iter().sum::<f64>() <= 0.0 {
            return flat;
        }
        let mut start = flat;
        for _ in 0..ROUNDS {
            let (one, _) = self.step(histogram, &start, &[], 0.0);
            let (two, likelihood_of_one) = self.step(histogram, &one, &[], 0.0);
            let mut first = 0.0;
            let mut bend = 0.0;
            for i in 0..start.len() {
                first += (one[i] - start[i]).powi(2);
                bend += (two[i] - 2.0 * one[i] + start[i]).powi(2);
            }
            if first < 1e-16 || bend <= 0.0 {
                return two;
            }
            let mut stride = (first / bend).sqrt().clamp(1.0, 4096.0);
            // A leap may make the sample less likely. Plain steps never do.
            start = loop {
                let leap = leap(&start, &one, &two, stride);
                let (landed, likelihood_of_leap) = self.step(histogram, &leap, &[], 0.0);
                if likelihood_of_leap >= likelihood_of_one {
                    break landed;
                }
                stride /= 4.0;
                if stride <= 1.0 {
                    break two;
                }
            };
        }
        start
    }

    /// The share of each multiplicity in a part of the memory. The fewer units the part has, the closer the shares are
    /// to `prior`.
    pub fn refine(&self, histogram: &Histogram, prior: &[f64]) -> Vec<f64> {
        const PRIOR_UNITS: f64 = 50.0;
        let mut shares = prior.to_vec();
        for _ in 0..40 {
            shares = self.step(histogram, &shares, prior, PRIOR_UNITS).0;
        }
        shares
    }

    /// The expectations for single units, given the shares.
    pub fn posterior(&self, shares: &[f64]) -> Posterior {
        let mut posterior = Posterior { saved: [0.0; FREQUENT], content: [0.0; FREQUENT] };
        for seen in 1..FREQUENT {
            let mut sum = 0.0;
            let mut inverse = 0.0;
            let mut alone = 0.0;
            for (at, &m) in self.multiplicity.iter().enumerate() {
                let weight = shares[at] * self.chance[at][seen];
                sum += weight;
                inverse += weight / m;
                alone += if m < 1.5 { weight } else { 0.0 };
            }
            if sum > 0.0 {
                posterior.saved[seen] = 1.0 - inverse / sum;
                posterior.content[seen] = (inverse - alone) / sum;
            }
        }
        posterior
    }

    /// One step of expectation and maximisation, and the log-likelihood of the shares before it.
    fn step(&self, histogram: &Histogram, shares: &[f64], prior: &[f64], prior_units: f64) -> (Vec<f64>, f64) {
        let mut next = vec![0.0; shares.len()];
        let mut likelihood = 0.0;
        for (seen, &units) in histogram.iter().enumerate().skip(1) {
            if units <= 0.0 {
                continue;
            }
            let mut sum = 0.0;
            for (chance, share) in self.chance.iter().zip(shares) {
                sum += chance[seen] * share;
            }
            likelihood += units * sum.max(f64::MIN_POSITIVE).ln();
            if sum > 0.0 {
                for (at, next) in next.iter_mut().enumerate() {
                    *next += units * self.chance[at][seen] * shares[at] / sum;
                }
            }
        }
        for (next, prior) in next.iter_mut().zip(prior) {
            *next += prior_units * prior;
        }
        let sum: f64 = next.iter().sum();
        if sum > 0.0 {
            for share in &mut next {
                *share /= sum;
            }
        }
        (next, likelihood)
    }
}

/// Extrapolates two steps, to positive shares that add up to 1.
fn leap(start: &[f64], one: &[f64], two: &[f64], stride: f64) -> Vec<f64> {
    let mut leap = Vec::with_capacity(start.len());
    for (at, start) in start.iter().enumerate() {
        let r = one[at] - start;
        let reached = start + 2.0 * stride * r + stride * stride * (two[at] - one[at] - r);
        // A share of zero could never grow again.
        leap.push(reached.max(1e-12));
    }
    let sum: f64 = leap.iter().sum();
    for share in &mut leap {
        *share /= sum;
    }
    leap
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected histogram of `units` sampled units of multiplicity `m`.
    fn expected(mixture: &Mixture, m: f64, units: f64) -> Histogram {
        let at = mixture.multiplicity.iter().position(|&grid| (grid - m).abs() < 0.5).unwrap();
        mixture.chance[at].map(|p| p * units)
    }

    #[test]
    fn multiplicities_are_recovered_from_expected_counts() {
        for fraction in [0.05, 0.2, 0.5, 0.8] {
            let mixture = Mixture::new(fraction);
            for m in [1.0, 2.0, 3.0, 10.0] {
                let histogram = expected(&mixture, m, 100_000.0);
                let posterior = mixture.posterior(&mixture.fit(&histogram));
                let saved = posterior.saving(&histogram) / 100_000.0;
                assert!((saved - (1.0 - 1.0 / m)).abs() < 0.03, "f {fraction} m {m}: {saved}");
            }
        }
    }

    #[test]
    fn an_empty_sample_saves_nothing() {
        let mixture = Mixture::new(0.3);
        let posterior = mixture.posterior(&mixture.fit(&[0.0; FREQUENT]));
        assert!(posterior.saving(&[0.0; FREQUENT]).abs() < 1e-12);
    }
}
