//! [`Problem::new`] on any specification.

use arbitrary::Arbitrary;
use attn_core::{Arrangement, BlockSizes, Dropout, KvStorage, Options, Pass, Phase, Problem, ProblemSpec};

use super::layout;
use super::size::{Float, Size, dtype};

/// Rows up to which a problem is also asked for what it computes row by row.
const COUNTED_ROWS: usize = 4096;

/// The fields of a specification.
#[derive(Debug, Arbitrary)]
pub struct Input {
    backward: bool,
    q_dtype: u8,
    kv_dtype: Option<u8>,
    kv_heads: Size,
    group: Size,
    stray_heads: bool,
    head_dim: Size,
    value_dim: Option<Size>,
    #[arbitrary(with = crate::lists::few)]
    lens: Vec<(Size, Size)>,
    stray_len: bool,
    padded: (bool, bool),
    paged: Option<layout::Input>,
    scale: Option<Float>,
    softcap: Option<Float>,
    causal: bool,
    window: (Option<Size>, Option<Size>),
    present: [bool; 4],
    dropout: Option<Float>,
    block_mask: Option<(Size, Size)>,
    want: [bool; 2],
    num_splits: Option<Size>,
    flags: [bool; 2],
    phase: Option<bool>,
    disabled: bool,
}

pub(super) fn check(input: &Input) {
    let spec = input.spec();
    let problem = match Problem::new(spec.clone()) {
        Ok(problem) => problem,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert!(problem.kv_heads() > 0 && problem.head_dim() > 0 && problem.value_dim() > 0);
    assert_eq!(problem.group() * problem.kv_heads(), problem.q_heads());
    assert!(problem.scale().is_finite());
    assert!(problem.softcap().is_none_or(|cap| cap > 0.0 && cap.is_finite()));
    assert!(problem.dropout().is_none_or(|Dropout { p }| p > 0.0 && p < 1.0));

    let again = Problem::new(problem.spec().clone()).expect("accepted once");
    assert_eq!(again, problem);
    assert_eq!(again.fingerprint(), problem.fingerprint());

    let lengths = problem.lengths();
    assert_eq!(lengths.batch(), spec.q_lens.len());
    for sequence in 0..lengths.batch() {
        assert_eq!(lengths.q(sequence), spec.q_lens[sequence]);
        assert_eq!(lengths.kv_rows(sequence).len(), spec.kv_lens[sequence]);
        assert!(lengths.q_rows(sequence).end <= lengths.total_q());
    }
    // Whoever sizes a tensor of an accepted problem multiplies its shape.
    let rest = [problem.q_heads(), problem.head_dim().max(problem.value_dim())];
    let elements = lengths.q_shape(problem.q_arrangement(), &rest);
    let elements = elements.iter().try_fold(1_usize, |n, extent| n.checked_mul(*extent));
    assert!(elements.is_some_and(|n| i64::try_from(n).is_ok()));

    if lengths.total_q() <= COUNTED_ROWS && lengths.batch() <= COUNTED_ROWS {
        let flops = problem.flops();
        assert!(lengths.total_q() > 0 || flops == 0);
    }
}

impl Input {
    fn spec(&self) -> ProblemSpec {
        let kv_heads = self.kv_heads.get();
        let q_heads = kv_heads.wrapping_mul(self.group.get());
        let head_dim = self.head_dim.get();
        let q_dtype = dtype(self.q_dtype);
        let arrangement = |padded| if padded { Arrangement::Padded } else { Arrangement::Packed };
        // A layout that does not stand alone is no part of a problem.
        let paged = self.paged.as_ref().and_then(|layout| layout.build().ok());

        let mut spec = ProblemSpec::new(
            q_dtype,
            q_heads.wrapping_add(usize::from(self.stray_heads)),
            kv_heads,
            head_dim,
            &self.lens.iter().map(|(q, _)| q.get()).collect::<Vec<_>>(),
            &self.lens.iter().map(|(_, kv)| kv.get()).collect::<Vec<_>>(),
        );
        if let (true, Some(layout)) = (self.padded.1, &paged) {
            // Fields that agree with the layout: otherwise hardly any would be accepted.
            spec.kv_dtype = layout.dtype();
            spec.kv_heads = layout.kv_heads();
            spec.q_heads = layout.kv_heads().wrapping_mul(self.group.get());
            spec.head_dim = layout.key_dim();
            spec.value_dim = layout.value().dim();
        } else {
            spec.kv_dtype = self.kv_dtype.map_or(q_dtype, dtype);
            spec.value_dim = self.value_dim.map_or(head_dim, Size::get);
        }
        spec.pass = if self.backward { Pass::Backward } else { Pass::Forward };
        spec.kv_lens.extend(self.stray_len.then_some(1));
        spec.q_arrangement = arrangement(self.padded.0);
        spec.kv = paged.map_or(KvStorage::Dense(arrangement(self.padded.1)), KvStorage::Paged);
        spec.scale = self.scale.map(Float::get);
        spec.softcap = self.softcap.map(Float::get);
        spec.causal = self.causal;
        spec.window_left = self.window.0.map(Size::get);
        spec.window_right = self.window.1.map(Size::get);
        [spec.mask, spec.bias, spec.alibi, spec.sinks] = self.present;
        spec.dropout = self.dropout.map(|p| Dropout { p: p.get() });
        spec.block_mask = self.block_mask.map(|(q, kv)| BlockSizes { q: q.get(), kv: kv.get() });
        [spec.want_dsinks, spec.want_dbias] = self.want;
        spec.options = Options {
            num_splits: self.num_splits.map(Size::get),
            deterministic: self.flags[0],
            batch_invariant: self.flags[1],
            phase: self.phase.map(|p| if p { Phase::Prefill } else { Phase::Decode }),
            disabled_kernels: self.disabled.then(|| "a kernel".to_owned()).into_iter().collect(),
        };
        spec
    }
}
