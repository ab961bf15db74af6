//! The README shows programs that are compiled and run.

/// The first block of that language.
fn first_block<'a>(text: &'a str, language: &str) -> &'a str {
    let (_, rest) = text.split_once(&format!("```{language}\n")).expect("a block of that language");
    rest.split_once("```").expect("the block ends").0
}

#[test]
fn the_first_program_of_the_readme_is_the_example_hello() {
    let shown = first_block(include_str!("../README.md"), "rust");
    let compiled: String = include_str!("../examples/hello.rs")
        .lines()
        .skip_while(|line| line.starts_with("//!") || line.is_empty())
        .flat_map(|line| [line, "\n"])
        .collect();
    assert_eq!(shown, compiled, "copy examples/hello.rs into README.md, without its first comment");
}

#[test]
fn the_first_command_of_the_readme_names_an_example_of_under_200_lines() {
    let command = first_block(include_str!("../README.md"), "sh").trim();
    assert_eq!(command, "cargo run --release --example word_count -- FILE");
    assert!(include_str!("../examples/word_count.rs").lines().count() < 200);
}

/// The names of all functions of the files beneath that begin so.
fn functions(folder: &std::path::Path, prefix: &str, found: &mut std::collections::BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, prefix, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let names =
                text.lines().filter_map(|line| line.trim_start().strip_prefix("fn ")?.split('(').next());
            found.extend(names.filter(|name| name.starts_with(prefix)).map(str::to_owned));
        }
    }
}

#[test]
fn every_mechanism_has_tests_that_are_named_after_it_and_listed() {
    let mut found = std::collections::BTreeSet::new();
    functions(concat!(env!("CARGO_MANIFEST_DIR"), "/tests").as_ref(), "m_", &mut found);
    let (mut ids, mut listed) = (Vec::new(), std::collections::BTreeSet::new());
    for row in include_str!("../docs/mechanisms.md").lines().filter_map(|line| line.strip_prefix("| ")) {
        let (id, tests) = row.split_once(" | ").expect("two columns");
        if id == "id" {
            continue;
        }
        ids.push(id.to_owned());
        for test in tests.split('`').skip(1).step_by(2) {
            assert!(test.starts_with(&format!("m_{}_", id.to_lowercase())), "{test} in the row of {id}");
            listed.insert(test.to_owned());
        }
    }
    let all = [('D', 32), ('P', 4), ('W', 6), ('V', 5), ('G', 7)];
    let all = all.into_iter().flat_map(|(kind, most)| (1..=most).map(move |at| format!("{kind}{at:02}")));
    assert!(ids.iter().eq(all.collect::<Vec<_>>().iter()), "each id has a row, in order: {ids:?}");
    let unlisted: Vec<_> = found.symmetric_difference(&listed).collect();
    assert!(unlisted.is_empty(), "in docs/mechanisms.md or in tests/, and not in both: {unlisted:?}");
}
