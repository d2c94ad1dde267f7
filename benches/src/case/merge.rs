//! The operation `merge`: two attention states over disjoint keys become one.
//!
//! The invariant: shapes are checked here against the case's counts, so that a backend sees four tensors
//! that agree.

use std::path::Path;

use attn_core::DType;

use super::backend::Backend;
use super::description::{Fields, QueryType, count, counts};
use super::failure::Failure;
use super::input::{InputFile, Inputs};
use super::operand::{Operand, StoredType};
use super::output::{self, Output};
use super::report::Answer;

/// # Errors
/// Whatever the case deserves.
pub(crate) fn run(
    dir: &Path,
    mut fields: Fields,
    backend: &mut dyn Backend,
) -> Result<Answer, Failure> {
    let dtype = fields.required::<QueryType>("dtype")?.dtype();
    let heads = count("q_heads", fields.required("q_heads")?)?;
    let dim = count("value_dim", fields.required("value_dim")?)?;
    let q_lens: Vec<i64> = fields.required("q_lens")?;
    let placement = fields.placement()?;
    fields.finish()?;
    if dim == 0 {
        return Err(Failure::invalid("value_dim: expected at least 1, got 0"));
    }
    let rows = counts("q_lens", &q_lens)?
        .into_iter()
        .try_fold(0usize, usize::checked_add)
        .ok_or_else(|| Failure::invalid("q_lens: their sum overflows"))?;
    backend.check()?;
    let file = InputFile::read(dir)?;
    let file = file.tensors()?;
    let mut inputs = Inputs::new(&file, &placement);
    let (float, f32) = (StoredType::Float(dtype), StoredType::Float(DType::F32));
    let o_shape = [rows, heads, dim];
    let lse_shape = [rows, heads];
    let o_a = shaped(inputs.take("o_a", float)?, "o_a", &o_shape)?;
    let o_b = shaped(inputs.take("o_b", float)?, "o_b", &o_shape)?;
    let lse_a = shaped(inputs.take("lse_a", f32)?, "lse_a", &lse_shape)?;
    let lse_b = shaped(inputs.take("lse_b", f32)?, "lse_b", &lse_shape)?;
    output::check_kept(&placement, &["o", "lse"])?;
    let mut o = Output::new(&mut inputs, &placement, "o", dtype, &o_shape)?;
    let mut lse = Output::new(&mut inputs, &placement, "lse", DType::F32, &lse_shape)?;
    inputs.finish()?;

    let a = (&o_a.view()?, &lse_a.f32_view()?);
    let b = (&o_b.view()?, &lse_b.f32_view()?);
    let ran = backend.merge(a, b, &mut o.view_mut()?, &mut lse.f32_view_mut()?)?;
    output::write(dir, &[&o, &lse])?;
    Ok(Answer { kernel: ran.kernel, plan: ran.plan, ..Answer::default() })
}

fn shaped<'a>(tensor: Operand<'a>, field: &str, shape: &[usize]) -> Result<Operand<'a>, Failure> {
    let got = tensor.layout().shape();
    if got == shape {
        return Ok(tensor);
    }
    Err(Failure::invalid(format!("{field}: expected shape {shape:?}, got {got:?}")))
}
