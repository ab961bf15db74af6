//! The report as a table.

use super::Row;
use comfy_table::{CellAlignment, Table, presets};

/// Draws the rows, with a column for each rival.
pub fn render(rows: &[Row], rivals: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    let columns = [
        "bench", "size", "ranks", "face", "runtime", "value", "unit", "limit", "against", "ratio", "bar", "",
    ];
    table.set_header(columns.iter().chain(rivals));
    for row in rows {
        let limit = row.limit.map_or_else(String::new, figure);
        let ratio = row.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let sign = if row.higher_is_better { '≥' } else { '≤' };
        let bar = row.bar.map_or_else(String::new, |bar| format!("{sign} {bar}"));
        let mut cells = vec![
            row.bench.to_owned(),
            size(row.size),
            row.ranks.to_string(),
            row.face.to_owned(),
            row.runtime.to_owned(),
            figure(row.value),
            row.unit.to_owned(),
            limit,
            row.against.unwrap_or_default().to_owned(),
            ratio,
            bar,
            verdict(row).to_owned(),
        ];
        cells.extend(
            rivals.iter().map(|name| row.rivals.get(*name).copied().map_or_else(String::new, figure)),
        );
        table.add_row(cells);
    }
    for column in [1, 2, 5, 7, 9, 10].into_iter().chain(columns.len()..columns.len() + rivals.len()) {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// How each limit came about, in one line: of the first row that is held against it.
pub fn notes(rows: &[Row]) -> Vec<String> {
    let mut told = Vec::new();
    let limits = rows.iter().filter_map(|row| Some((row.against?, row.limit_detail.as_ref()?)));
    let first = limits.filter(|(name, _)| {
        !told.contains(name) && {
            told.push(*name);
            true
        }
    });
    first.map(|(name, detail)| format!("{name}: {detail}")).collect()
}

/// Whether the bar is met; bars hold for the handle on a current-thread runtime.
fn verdict(row: &Row) -> &'static str {
    let Some(bar) = row.bar else { return "" };
    let seen = row.ratio.unwrap_or(row.value);
    match if row.higher_is_better { seen >= bar } else { seen <= bar } {
        true => "met",
        false => "missed",
    }
}

fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

fn size(bytes: usize) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => b.to_string(),
    }
}
