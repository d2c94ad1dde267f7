//! The support table of the README, made from the catalogue.
//!
//! The invariant: the README's table is this function's output, character for character; a test holds
//! them together, so the table cannot promise what no kernel states.

use std::fmt::Write as _;

use attn_core::{DType, Feature, KernelDesc};

/// One row a feature or limit, one column a kernel, as Markdown.
pub(crate) fn table(catalog: &[KernelDesc]) -> String {
    let mut text = String::new();
    let mut line = |head: &str, cell: &dyn Fn(&KernelDesc) -> String| {
        let cells: Vec<String> = catalog.iter().map(cell).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| {head} | {} |", cells.join(" | "));
    };
    let names = |dtypes: &[DType]| dtypes.iter().map(|d| d.name()).collect::<Vec<_>>().join(" ");
    line("", &|k| format!("`{}`", k.name));
    line("---", &|_| "---".to_owned());
    line("engine, family", &|k| format!("{}, {}", k.engine, k.family));
    line("q", &|k| names(k.q_dtypes));
    line("o", &|k| {
        let mut outputs: Vec<DType> = k.q_dtypes.iter().map(|q| q.output()).collect();
        outputs.sort();
        outputs.dedup();
        names(&outputs)
    });
    line("k, v", &|k| names(k.kv_dtypes));
    line("head dim", &|k| k.head_dims.to_string());
    line("query rows a sequence", &|k| {
        k.max_query_rows.map_or_else(|| "any".to_owned(), |most| format!("at most {most}"))
    });
    line("made for", &|k| {
        let names: Vec<_> = k.requires.iter().map(Feature::name).collect();
        if names.is_empty() { "any".to_owned() } else { names.join(", ") }
    });
    for feature in Feature::ALL {
        line(feature.name(), &|k| {
            (if k.features.contains(feature) { "yes" } else { "-" }).to_owned()
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readme_holds_the_generated_table() {
        let readme = include_str!("../../README.md");
        let table = table(attn_kernels::catalog());
        assert!(readme.contains(&table), "put this into README.md:\n{table}");
    }
}
