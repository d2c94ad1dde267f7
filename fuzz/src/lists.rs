//! Lists from a fuzzer's bytes. The derived reading of a `Vec` ends after each element with even odds,
//! so that a program of twenty steps would be one input in a million.

use arbitrary::{Arbitrary, Result, Unstructured};

/// Up to four elements, each number as likely as the others.
///
/// # Errors
/// As for the elements.
pub fn few<'a, T: Arbitrary<'a>>(bytes: &mut Unstructured<'a>) -> Result<Vec<T>> {
    let count = bytes.int_in_range(0..=4)?;
    (0..count).map(|_| T::arbitrary(bytes)).collect()
}

/// As many elements as the bytes last for.
///
/// # Errors
/// As for the elements.
pub fn rest<'a, T: Arbitrary<'a>>(bytes: &mut Unstructured<'a>) -> Result<Vec<T>> {
    let mut list = Vec::new();
    while !bytes.is_empty() {
        list.push(T::arbitrary(bytes)?);
    }
    Ok(list)
}
