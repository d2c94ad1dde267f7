//! [`Inputs::check`] on small problems with data that fits, or nearly: after it has said yes, every
//! row, mask and bias that an engine will ask for is there.

use arbitrary::Arbitrary;
use attn_core::{
    Arrangement, BlockSizes, CacheLayout, DType, Inputs, KvStorage, KvView, PageOrder, Problem,
    ProblemSpec, TensorView, ValueStorage, View,
};

/// Storage behind every tensor; large enough for any shape below.
const STORAGE: usize = 1 << 14;

/// A small problem and its data.
#[derive(Debug, Arbitrary)]
pub struct Input {
    #[arbitrary(with = crate::lists::few)]
    lens: Vec<(u8, u8)>,
    kv_heads: u8,
    group: u8,
    dims: (u8, u8),
    padded: (bool, bool),
    paged: Option<Paged>,
    causal: bool,
    window_left: Option<u8>,
    mask: Option<[u8; 4]>,
    bias: Option<[u8; 4]>,
    blocks: Option<(u8, u8, [u8; 4])>,
    per_head: [bool; 2],
    hidden: [bool; 3],
    stray: Option<(u8, u8)>,
}

#[derive(Debug, Arbitrary)]
struct Paged {
    hnd: bool,
    page_size: u8,
    pages: u8,
    width: u8,
    #[arbitrary(with = crate::lists::few)]
    table: Vec<i8>,
    prefix: bool,
    other_stamp: bool,
}

pub(super) fn check(input: &Input) {
    let Some(problem) = input.problem() else { return };
    let floats = vec![0.0_f32; STORAGE];
    let bytes = vec![1_u8; STORAGE];
    let table: Vec<i32> = input.table();
    let Some(inputs) = input.data(&problem, &floats, &bytes, &table) else { return };
    if let Err(error) = inputs.check(&problem) {
        assert!(!error.to_string().is_empty());
        return;
    }

    let block_table = match &inputs.kv {
        KvView::Paged { block_table, .. } => Some(block_table),
        KvView::Dense { .. } => None,
    };
    let (KvView::Paged { k_cache: keys, .. } | KvView::Dense { k: keys, .. }) = &inputs.kv;
    let (TensorView::F32(q), TensorView::F32(keys)) = (&inputs.q, keys) else {
        panic!("f32 was asked for")
    };
    for sequence in 0..problem.lengths().batch() {
        let (q_len, kv_len) = (problem.lengths().q(sequence), problem.lengths().kv(sequence));
        let rows = problem.q_rows(q, sequence).expect("q was checked");
        assert_eq!(rows.shape(), [q_len, problem.q_heads(), problem.head_dim()]);
        let rows = problem.cached_rows(keys, block_table, sequence).expect("k was checked");
        assert_eq!(rows.tokens(), kv_len);
        for (token, head) in pairs(kv_len, problem.kv_heads()) {
            let row = rows.row(token, head).expect("k was checked");
            assert_eq!(row.len(), problem.head_dim());
        }
        for head in 0..problem.q_heads() {
            let mask = inputs.mask_of(&problem, sequence, head).expect("masks were checked");
            let bias = inputs.bias_of(&problem, sequence, head).expect("the bias was checked");
            for (row, key) in pairs(q_len, kv_len) {
                // All bytes are 1: nothing but the band hides a key.
                assert_eq!(mask.sees(row, key), mask.band().row(row, q_len, kv_len).contains(&key));
                assert!(bias.as_ref().is_none_or(|b| b.get(&[row, key]).is_some()));
            }
        }
    }
}

impl Input {
    fn problem(&self) -> Option<Problem> {
        let kv_heads = usize::from(self.kv_heads % 3) + 1;
        let mut spec = ProblemSpec::new(
            DType::F32,
            kv_heads * usize::from(self.group % 3),
            kv_heads,
            usize::from(self.dims.0 % 4) + 1,
            &self.lens.iter().map(|(q, _)| usize::from(q % 6)).collect::<Vec<_>>(),
            &self.lens.iter().map(|(_, kv)| usize::from(kv % 9)).collect::<Vec<_>>(),
        );
        spec.value_dim = usize::from(self.dims.1 % 4) + 1;
        spec.q_arrangement = arrangement(self.padded.0);
        spec.kv = KvStorage::Dense(arrangement(self.padded.1));
        if let Some(paged) = &self.paged {
            let value = if paged.prefix {
                ValueStorage::PrefixOfKey(spec.value_dim)
            } else {
                ValueStorage::Separate(spec.value_dim)
            };
            let order = if paged.hnd { PageOrder::Hnd } else { PageOrder::Nhd };
            let size = paged.page_size();
            let (heads, dim) = (spec.kv_heads, spec.head_dim);
            let layout = CacheLayout::contiguous(DType::F32, order, size, heads, dim, value);
            spec.kv = KvStorage::Paged(layout.ok()?);
        }
        spec.causal = self.causal;
        spec.window_left = self.window_left.map(usize::from);
        spec.mask = self.mask.is_some() && !self.hidden[0];
        spec.bias = self.bias.is_some() && !self.hidden[1];
        spec.block_mask = self.blocks.map(|(q, kv, _)| BlockSizes {
            q: usize::from(q % 5) + 1,
            kv: usize::from(kv % 5) + 1,
        });
        [spec.alibi, spec.sinks] = self.per_head;
        Some(Problem::new(spec).expect("small and consistent"))
    }

    /// Page ids from -1 to 5, of which some exist.
    fn table(&self) -> Vec<i32> {
        let ids = self.paged.as_ref().map_or(&[][..], |p| &p.table);
        ids.iter()
            .map(|id| i32::from(id.rem_euclid(7)) - 1)
            .chain(std::iter::repeat(0))
            .take(STORAGE)
            .collect()
    }

    /// Data for the problem; `stray` changes an extent of one tensor.
    fn data<'a>(
        &self,
        problem: &Problem,
        floats: &'a [f32],
        bytes: &'a [u8],
        table: &'a [i32],
    ) -> Option<Inputs<'a>> {
        let l = problem.lengths();
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let (dim, value_dim) = (problem.head_dim(), problem.value_dim());
        let stray = |tensor: u8, mut shape: Vec<usize>| {
            if let Some((which, how)) = self.stray
                && which % 8 == tensor
                && !shape.is_empty()
            {
                let axis = usize::from(how) % shape.len();
                shape[axis] = shape[axis].wrapping_sub(1).min(9);
            }
            shape
        };
        let tensor =
            |n: u8, shape: &[usize]| view(floats, &stray(n, shape.to_vec())).map(TensorView::F32);

        let q_shape = l.q_shape(problem.q_arrangement(), &[heads, dim]);
        let q = tensor(0, &q_shape)?;
        let kv = match problem.kv() {
            KvStorage::Dense(at) => KvView::Dense {
                k: tensor(1, &l.kv_shape(*at, &[kv_heads, dim]))?,
                v: tensor(2, &l.kv_shape(*at, &[kv_heads, value_dim]))?,
            },
            KvStorage::Paged(layout) => {
                let paged = self.paged.as_ref()?;
                let pages = usize::from(paged.pages % 6);
                let width = usize::from(paged.width % 10);
                let cache = |n, dim, strides: attn_core::PageStrides| {
                    let (size, heads) = (layout.page_size(), layout.kv_heads());
                    let (shape, strides) = match layout.order() {
                        PageOrder::Nhd => (
                            [pages, size, heads, dim],
                            [strides.page, strides.slot, strides.head, 1],
                        ),
                        PageOrder::Hnd => (
                            [pages, heads, size, dim],
                            [strides.page, strides.head, strides.slot, 1],
                        ),
                    };
                    let shape = stray(n, shape.to_vec());
                    View::strided("cache", floats, &shape, &strides, 0).ok().map(TensorView::F32)
                };
                let mut stamp = layout.id();
                if paged.other_stamp {
                    let (order, heads) = (layout.order(), layout.kv_heads());
                    let (size, value) = (layout.page_size() + 1, layout.value());
                    let other = CacheLayout::contiguous(DType::F32, order, size, heads, dim, value);
                    stamp = other.ok()?.id();
                }
                KvView::Paged {
                    k_cache: cache(1, dim, layout.key_strides())?,
                    v_cache: cache(2, value_dim, layout.value_strides())?,
                    block_table: view(table, &stray(3, vec![l.batch(), width]))?,
                    stamp,
                }
            }
        };

        let mut inputs = Inputs::dense(q.clone(), q.clone(), q);
        inputs.kv = kv;
        let pairs = [l.batch(), heads, l.longest_q(), l.longest_kv()];
        if let Some(extents) = self.mask {
            inputs.mask = Some(view(bytes, &stray(4, broadcast(extents, pairs)))?);
        }
        if let Some(extents) = self.bias {
            inputs.bias = Some(view(floats, &stray(5, broadcast(extents, pairs)))?);
        }
        if let (Some((_, _, extents)), Some(sizes)) = (self.blocks, problem.block_mask()) {
            let [batch, heads, rows, keys] = pairs;
            let blocks = [batch, heads, rows.div_ceil(sizes.q), keys.div_ceil(sizes.kv)];
            inputs.block_mask = Some(view(bytes, &stray(6, broadcast(extents, blocks)))?)
                .filter(|_| !self.hidden[2]);
        }
        if problem.has_alibi() {
            inputs.alibi = Some(view(floats, &stray(7, vec![heads]))?);
        }
        if problem.has_sinks() {
            inputs.sinks = Some(view(floats, &[heads])?);
        }
        Some(inputs)
    }
}

impl Paged {
    fn page_size(&self) -> usize {
        usize::from(self.page_size % 4) + 1
    }
}

/// The front of some storage as a contiguous view.
fn view<'a, T: Copy>(storage: &'a [T], shape: &[usize]) -> Option<View<'a, T>> {
    let count = shape.iter().try_fold(1_usize, |n, extent| n.checked_mul(*extent))?;
    View::contiguous("x", storage.get(..count)?, shape).ok()
}

/// A shape that broadcasts to `full`: from each byte an extent of 1 or the whole, from the first also
/// how many leading axes are left out.
fn broadcast(extents: [u8; 4], full: [usize; 4]) -> Vec<usize> {
    let shape =
        extents.iter().zip(full).map(|(byte, extent)| if byte % 2 == 0 { 1 } else { extent });
    shape.skip(usize::from(extents[0] / 2 % 3)).collect()
}

fn arrangement(padded: bool) -> Arrangement {
    if padded { Arrangement::Padded } else { Arrangement::Packed }
}

fn pairs(rows: usize, columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)))
}
