//! The smoke suite through the engine, and records that are cut short, taken up and refused.

use std::fs;
use std::path::PathBuf;

use super::*;

const CEILINGS: Ceilings = Ceilings { matmul_tflops: 0.1, read_gbps: 10.0 };

fn row(point: &Point, outcome: Outcome) -> Row {
    Row { id: point.id(), point: *point, ceilings: CEILINGS, outcome }
}

/// A file of this process alone, gone when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let name = format!("attn-sweep-{}-{name}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing to be done where it is gone already.
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn smoke_suite_is_measured_or_refused_with_a_reason() {
    let engine = CpuEngine::new().expect("an engine");
    let host = Host { engine: &engine, seconds: 1e-6 };
    let suite = Suite::read("smoke").expect("a suite");
    for point in &suite.points {
        match point.refusal() {
            Some(why) => assert!(point.id().ends_with("acc-f16") && why.contains("f16"), "{why}"),
            None => {
                let m = host.measure(point, CEILINGS).expect("a time");
                assert!(m.times.p50_us > 0.0 && m.times.p50_us <= m.times.p99_us, "{m:?}");
                assert!(m.tflops > 0.0 && m.gbps > 0.0 && !m.reason.is_empty(), "{m:?}");
                let family = point.id().split('/').next().unwrap_or_default().to_owned();
                assert!(m.kernel.contains(&family), "{} by {}", point.id(), m.kernel);
            }
        }
    }
}

#[test]
fn record_is_taken_up_where_it_was_cut() {
    let engine = CpuEngine::new().expect("an engine");
    let (machine, suite) = (Machine::detect(&engine), Suite::read("smoke").expect("a suite"));
    let (file, table) = (Scratch::new("cut.jsonl"), Scratch::new("cut.csv"));
    let [first, second, ..] = &suite.points[..] else { panic!("two points") };
    let host = Host { engine: &engine, seconds: 1e-6 };
    let measured = Outcome::Measured(host.measure(first, CEILINGS).expect("a time"));
    let rows = [
        row(first, measured),
        row(second, Outcome::Refused { why: "says \"so\", and why".to_owned() }),
    ];
    let mut record = Record::open(Some(&file.0), &machine, &suite).expect("a record");
    for row in &rows {
        record.add(row.clone()).expect("room");
    }
    drop(record);
    let text = fs::read_to_string(&file.0).expect("a file");
    fs::write(&file.0, &text[..text.len() - 5]).expect("room");

    let mut record = Record::open(Some(&file.0), &machine, &suite).expect("a record");
    assert_eq!(record.rows(), &rows[..1]);
    assert!(record.has(&first.id()) && !record.has(&second.id()));
    record.add(rows[1].clone()).expect("room");
    assert_eq!(fs::read_to_string(&file.0).expect("a file"), text);

    record.write_table(&table.0).expect("room");
    let mut table = csv::Reader::from_path(&table.0).expect("a table");
    let cells: Vec<_> = table.records().map(|row| row.expect("cells")).collect();
    assert_eq!(&cells[1][2], "refused");
    assert_eq!(&cells[1][cells[1].len() - 1], "says \"so\", and why");
}

#[test]
fn record_of_another_suite_or_of_nothing_is_refused() {
    let engine = CpuEngine::new().expect("an engine");
    let machine = Machine::detect(&engine);
    let file = Scratch::new("other.jsonl");
    let open =
        |suite: &str| Record::open(Some(&file.0), &machine, &Suite::read(suite).expect("a suite"));
    drop(open("smoke").expect("a record"));
    assert!(matches!(open("cpu"), Err(RecordError::Other { field: "suite", .. })));
    fs::write(&file.0, "no record\n").expect("room");
    assert!(matches!(open("smoke"), Err(RecordError::Line { line: 1, .. })));
}
