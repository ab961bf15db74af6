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
