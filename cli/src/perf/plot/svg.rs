//! A chart with two logarithmic axes, as SVG.

use std::fmt::Write;

/// Lines over sizes in bytes.
pub struct Chart {
    pub title: String,
    /// What the sizes are of.
    pub across: String,
    /// The unit of the values.
    pub up: String,
    pub series: Vec<Series>,
}

/// A line.
pub struct Series {
    pub label: String,
    /// Size and value; both above 0.
    pub points: Vec<(f64, f64)>,
    /// Drawn dashed and without marks: no competitor.
    pub dashed: bool,
}

/// Told apart by all who see colours differently (Okabe and Ito 2008).
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];
const GREYS: [&str; 3] = ["#555555", "#999999", "#bbbbbb"];
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 250.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;

/// Where a logarithmic axis begins and ends.
#[derive(Clone, Copy)]
struct Axis {
    from: f64,
    to: f64,
}

impl Axis {
    /// From round value to round value, and never empty: powers of two, or 1, 2 and 5 times powers of ten.
    fn over(values: impl Iterator<Item = f64>, binary: bool) -> Axis {
        let values = values.filter(|value| value.is_finite() && *value > 0.0);
        let (low, high) =
            values.fold((f64::INFINITY, 0.0f64), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return Axis { from: 1.0, to: 10.0 };
        }
        let (from, to) = if binary {
            (low.log2().floor().exp2(), high.log2().ceil().exp2())
        } else {
            let round = |value: f64| {
                let decade = 10f64.powf(value.log10().floor());
                [1.0, 2.0, 5.0, 10.0].map(|times| times * decade)
            };
            let below = round(low).into_iter().rfind(|value| *value <= low * 1.000_001);
            let above = round(high).into_iter().find(|value| *value >= high * 0.999_999);
            (below.unwrap_or(low), above.unwrap_or(high))
        };
        Axis { from, to: if to > from { to } else { from * 2.0 } }
    }

    /// From 0 to 1 inside of the axis.
    fn place(&self, value: f64) -> f64 {
        (value / self.from).ln() / (self.to / self.from).ln()
    }

    fn has(&self, value: f64) -> bool {
        (-1e-9..=1.0 + 1e-9).contains(&self.place(value))
    }
}

impl Chart {
    /// The picture.
    pub fn draw(&self) -> String {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let across = Axis::over(points().map(|point| point.0), true);
        let up = Axis::over(points().map(|point| point.1), false);
        let x = |value: f64| LEFT + across.place(value) * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| HEIGHT - BOTTOM - up.place(value) * (HEIGHT - TOP - BOTTOM);
        let mut out = String::new();
        let mut add = |text: std::fmt::Arguments<'_>| {
            // Writing to a string does not fail.
            let _ = out.write_fmt(text);
            out.push('\n');
        };
        add(format_args!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13" fill="#222222">"##
        ));
        add(format_args!(r##"<rect width="100%" height="100%" fill="#ffffff"/>"##));
        add(format_args!(
            r#"<text x="{LEFT}" y="28" font-size="17" font-weight="bold">{}</text>"#,
            escaped(&self.title)
        ));
        let (low, high) = (HEIGHT - BOTTOM, TOP);
        let (begin, end) = (LEFT, WIDTH - RIGHT);
        // As many labels as have room beside each other.
        let powers = (across.to / across.from).log2().round() as i32;
        let step = 1 + powers / 10;
        for power in (0..=powers).step_by(step as usize) {
            let value = across.from * f64::from(power).exp2();
            let at = x(value);
            add(format_args!(
                r##"<line x1="{at:.1}" y1="{low}" x2="{at:.1}" y2="{high}" stroke="#e4e4e4"/><text x="{at:.1}" y="{:.1}" text-anchor="middle">{}</text>"##,
                low + 20.0,
                size(value)
            ));
        }
        let decades = (up.to / up.from).log10();
        for decade in up.from.log10().floor() as i32..=up.to.log10().ceil() as i32 {
            for times in 1..10 {
                let value = 10f64.powi(decade) * f64::from(times);
                if !up.has(value) {
                    continue;
                }
                let at = y(value);
                let colour = if times == 1 { "#cccccc" } else { "#f0f0f0" };
                add(format_args!(
                    r#"<line x1="{begin}" y1="{at:.1}" x2="{end}" y2="{at:.1}" stroke="{colour}"/>"#
                ));
                // Few decades need labels between them.
                if times == 1 || (decades <= 2.5 && (times == 2 || times == 5)) {
                    add(format_args!(
                        r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
                        begin - 8.0,
                        at + 4.0,
                        number(value)
                    ));
                }
            }
        }
        add(format_args!(
            r##"<rect x="{begin}" y="{high}" width="{}" height="{}" fill="none" stroke="#888888"/>"##,
            end - begin,
            low - high
        ));
        add(format_args!(
            r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{}, bytes (log)</text>"#,
            (begin + end) / 2.0,
            HEIGHT - 16.0,
            escaped(&self.across)
        ));
        let middle = (low + high) / 2.0;
        add(format_args!(
            r#"<text x="20" y="{middle:.1}" text-anchor="middle" transform="rotate(-90 20 {middle:.1})">{} (log)</text>"#,
            escaped(&self.up)
        ));
        let (mut colours, mut greys) = (COLOURS.iter().cycle(), GREYS.iter().cycle());
        for (index, series) in self.series.iter().enumerate() {
            let colour = if series.dashed { greys.next() } else { colours.next() }.unwrap_or(&"#000000");
            let line = if series.dashed {
                r#"stroke-width="2" stroke-dasharray="6 4""#
            } else {
                r#"stroke-width="2.2""#
            };
            let drawn: Vec<(f64, f64)> = series
                .points
                .iter()
                .filter(|(size, value)| *size > 0.0 && *value > 0.0 && value.is_finite())
                .map(|(size, value)| (x(*size), y(*value)))
                .collect();
            let path: Vec<String> = drawn.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            add(format_args!(
                r#"<polyline points="{}" fill="none" stroke="{colour}" {line}/>"#,
                path.join(" ")
            ));
            for (x, y) in drawn.iter().filter(|_| !series.dashed) {
                add(format_args!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.2" fill="{colour}"/>"#));
            }
            let (from, at) = (end + 16.0, high + 12.0 + 22.0 * index as f64);
            add(format_args!(
                r#"<line x1="{from}" y1="{at}" x2="{}" y2="{at}" stroke="{colour}" {line}/><text x="{}" y="{}">{}</text>"#,
                from + 28.0,
                from + 36.0,
                at + 4.0,
                escaped(&series.label)
            ));
        }
        add(format_args!("</svg>"));
        out
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn number(value: f64) -> String {
    // Of powers of ten and their halves: no digit is noise.
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn size(bytes: f64) -> String {
    let (k, m) = (1024.0, 1024.0 * 1024.0);
    match bytes {
        b if b >= m => format!("{} MiB", b / m),
        b if b >= k => format!("{} KiB", b / k),
        b => format!("{b}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(series: Vec<Series>) -> String {
        Chart { title: "a < b & c".into(), across: "block size".into(), up: "µs".into(), series }.draw()
    }

    fn line(label: &str, points: &[(f64, f64)], dashed: bool) -> Series {
        Series { label: label.into(), points: points.to_vec(), dashed }
    }

    #[test]
    fn every_series_has_a_line_a_legend_and_its_marks() {
        let ours = line("ours", &[(8.0, 0.2), (1024.0, 0.9), (65536.0, 20.0)], false);
        let text = chart(vec![ours, line("a limit", &[(8.0, 0.1), (65536.0, 0.1)], true)]);
        assert_eq!(text.matches("<polyline").count(), 2);
        assert_eq!(text.matches("<circle").count(), 3);
        for told in [
            "a &lt; b &amp; c",
            ">ours</text>",
            ">a limit</text>",
            "stroke-dasharray",
            "32 KiB",
            ">0.1<",
            "µs (log)",
        ] {
            assert!(text.contains(told), "{told}: {text}");
        }
    }

    #[test]
    fn points_lie_inside_of_the_frame_and_larger_values_are_higher() {
        let text = chart(vec![line("x", &[(8.0, 1.0), (16.0, 100.0)], false)]);
        let points = text.split("points=\"").nth(1).and_then(|rest| rest.split('"').next()).expect("a line");
        let places: Vec<(f64, f64)> = points
            .split(' ')
            .map(|point| point.split_once(',').expect("two numbers"))
            .map(|(x, y)| (x.parse().expect("a number"), y.parse().expect("a number")))
            .collect();
        assert_eq!(places, [(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, TOP)]);
    }

    #[test]
    fn nothing_and_what_has_no_logarithm_is_drawn_without_it() {
        let text = chart(vec![line("empty", &[], false), line("odd", &[(8.0, 0.0), (8.0, f64::NAN)], false)]);
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert!(!text.contains("<circle"));
    }
}
