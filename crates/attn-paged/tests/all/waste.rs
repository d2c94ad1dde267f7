//! Memory that pages waste on lengths as they occur in serving.

use attn_paged::{Allocator, Config, Namespace};

/// Uniform numbers in (0, 1]: a 64-bit linear congruence with the multiplier of MMIX.
struct Uniform(u64);

impl Uniform {
    fn next(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// A normal number, by Box and Muller.
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.next().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.next()).cos()
    }

    /// A log-normal length of this mean, at least 1.
    #[expect(clippy::cast_possible_truncation, reason = "`as` saturates, and the mean is small")]
    #[expect(clippy::cast_sign_loss, reason = "exponentials are positive")]
    fn length(&mut self, mean: f64, sigma: f64) -> usize {
        let mu = mean.ln() - sigma * sigma / 2.0;
        ((mu + sigma * self.normal()).exp().round() as usize).max(1)
    }
}

#[test]
fn waste_stays_under_four_percent_on_log_normal_lengths() {
    for sigma in [0.5, 1.0] {
        let mut random = Uniform(1);
        let mut pool = Allocator::new(Config::new(200_000, 16)).unwrap();
        let mut total = 0;
        for id in 0..4000 {
            let length = random.length(400.0, sigma);
            total += length;
            // Half of a sequence is prompt, half is decoded token by token.
            let seq = pool.alloc(&vec![id; length / 2], Namespace::DEFAULT).unwrap().seq;
            for token in length / 2..length {
                pool.append_one(seq, u32::try_from(token).unwrap()).unwrap();
            }
        }
        let stats = pool.stats();
        let mean = total as f64 / 4000.0;
        println!(
            "sigma {sigma}: mean length {mean:.0}, {} blocks held, {} of {} slots wasted: {:.2} %",
            stats.held,
            stats.wasted_slots,
            stats.held * stats.block_size,
            100.0 * stats.waste()
        );
        assert_eq!(stats.tokens, total);
        assert_eq!(stats.wasted_slots, stats.held * 16 - total);
        assert!((360.0..440.0).contains(&mean), "{mean}");
        assert!(stats.waste() < 0.04, "{}", stats.waste());
    }
}
