//! Plots of records, as SVG: medians as points, minimum to maximum as bars.

use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::{
    Cartesian2d, Circle, DrawingArea, DrawingAreaErrorKind, IntoDrawingArea, PathElement, RGBColor,
    SVGBackend, Text,
};
use plotters::style::{Color, WHITE};

use crate::Spread;
use crate::cap::CapRow;
use crate::figures::{SPEED, figure};
use crate::harness::{Role, Run};
use crate::io::{IoRow, Streaming};
use crate::record::{Outcome, Record};

/// Width of a plot and height of each of its panels, in pixels.
const WIDTH: u32 = 900;
const PANEL: u32 = 300;
/// Height of the title, in pixels.
const TITLE: u32 = 60;

/// Distance of series over the same places, in places.
const BESIDE: f64 = 0.09;
/// Half the width of a bar's end, in places.
const END: f64 = 0.03;

const BLUE: RGBColor = RGBColor(31, 119, 180);
const ORANGE: RGBColor = RGBColor(214, 100, 20);
const GREEN: RGBColor = RGBColor(44, 140, 60);
const GREY: RGBColor = RGBColor(120, 120, 120);

/// A plot that cannot be drawn.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlotError {
    /// No row counts.
    #[error("the record has no row that counts: there is nothing to draw")]
    Empty,
    /// The drawing failed.
    #[error("the plot cannot be drawn: {0}")]
    Draw(String),
}

type Drawn<'a> =
    Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as plotters::prelude::DrawingBackend>::ErrorType>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// One point with its bar.
struct Point {
    x: f64,
    y: Spread,
}

/// Points of one colour.
struct Series {
    name: String,
    colour: RGBColor,
    points: Vec<Point>,
    line: bool,
}

/// One panel: a figure over the same horizontal axis as the others.
struct Panel {
    y: &'static str,
    series: Vec<Series>,
}

/// A whole plot.
struct Plot {
    title: String,
    subtitle: String,
    x: &'static str,
    /// Words at 0, 1, 2, … of the horizontal axis.
    labels: Vec<String>,
    panels: Vec<Panel>,
}

/// The plot of a record.
///
/// # Errors
/// A record without rows that count.
pub fn svg(record: &Record) -> Result<String, PlotError> {
    let plot = match &record.outcome {
        Outcome::Cap { rows, .. } => of_caps(record, rows),
        Outcome::Ab { result } => of_pairs(record, &result.name),
        Outcome::Io { rows, streaming, .. } => of_drive(record, rows, streaming.as_deref()),
    };
    if plot.panels.iter().all(|panel| panel.series.iter().all(|series| series.points.is_empty())) {
        return Err(PlotError::Empty);
    }
    let mut text = String::new();
    draw(&plot, &mut text).map_err(|error| PlotError::Draw(error.to_string()))?;
    Ok(text)
}

fn of_caps(record: &Record, rows: &[CapRow]) -> Plot {
    let panel = |key: &str, y: &'static str, scale: f64| {
        let point = |(at, row): (usize, &CapRow)| {
            let y = scaled(row.figures.get(key)?, scale);
            Some(Point { x: at as f64, y })
        };
        let points = rows.iter().enumerate().filter_map(point).collect();
        Panel { y, series: vec![Series { name: String::new(), colour: BLUE, points, line: true }] }
    };
    let panels = vec![
        panel(SPEED, "decode, tokens/s", 1.0),
        panel("bytes_per_token", "read a token, MiB", 1.0 / f64::from(1 << 20)),
        panel("felt_wait_ms_per_token", "felt wait a token, ms", 1.0),
        panel("hit_rate", "hit rate of decode, %", 100.0),
    ];
    Plot {
        title: "Decode by size of the expert cache".to_owned(),
        subtitle: subtitle(record, "median, minimum to maximum over all prompts"),
        x: "experts kept a layer (--cap)",
        labels: rows.iter().map(|row| row.cap.to_string()).collect(),
        panels,
    }
}

fn of_pairs(record: &Record, name: &str) -> Plot {
    let runs: Vec<&Run> = record.runs.iter().filter(|run| run.role != Role::Probe).collect();
    let series = |name: &str, colour, key: &str, scale: f64, of: &dyn Fn(&Run) -> bool| {
        let point = |(at, run): (usize, &&Run)| {
            let values: Option<Vec<f64>> = run.counted()?.measured().map(figure(key)?.of).collect();
            Some(Point { x: at as f64, y: scaled(&Spread::of(&values?)?, scale) })
        };
        let points = runs.iter().enumerate().filter(|(_, run)| of(run)).filter_map(point).collect();
        Series { name: name.to_owned(), colour, points, line: false }
    };
    let panel = |key, y, scale| Panel {
        y,
        series: vec![
            series("A, control", GREY, key, scale, &|run| run.role == Role::Control),
            series("A", BLUE, key, scale, &|run| run.role == Role::Measured && run.arm == 0),
            series("B", ORANGE, key, scale, &|run| run.role == Role::Measured && run.arm == 1),
        ],
    };
    Plot {
        title: format!("A and B in turn: {}", if name.is_empty() { "no difference" } else { name }),
        subtitle: subtitle(record, "median, minimum to maximum over a run's prompts"),
        x: "run, in order",
        labels: (1..=runs.len()).map(|at| at.to_string()).collect(),
        panels: vec![
            panel(SPEED, "decode, tokens/s", 1.0),
            panel("bytes_per_token", "read a token, MiB", 1.0 / f64::from(1 << 20)),
            panel("felt_wait_ms_per_token", "felt wait a token, ms", 1.0),
        ],
    }
}

fn of_drive(record: &Record, rows: &[IoRow], streaming: Option<&Streaming>) -> Plot {
    let mut depths: Vec<usize> = rows.iter().map(|row| row.depth).collect();
    depths.sort_unstable();
    depths.dedup();
    let place = |depth: usize| depths.iter().position(|known| *known == depth).unwrap_or(0) as f64;
    let ways = [
        ("direct, threads", BLUE),
        ("direct, uring", ORANGE),
        ("buffered, threads", GREY),
        ("buffered, uring", GREEN),
    ];
    let panel = |y, of: &dyn Fn(&IoRow) -> Option<Spread>| {
        let series = |(name, colour): (&str, RGBColor)| {
            let own = |row: &&IoRow| {
                format!("{}, {}", if row.direct { "direct" } else { "buffered" }, row.io) == name
            };
            let point = |row: &IoRow| Some(Point { x: place(row.depth), y: of(row)? });
            let points: Vec<Point> = rows.iter().filter(own).filter_map(point).collect();
            Series { name: name.to_owned(), colour, points, line: true }
        };
        Panel { y, series: ways.map(series).into_iter().filter(|series| !series.points.is_empty()).collect() }
    };
    let decode = streaming.and_then(|streaming| streaming.of_raw).map_or(String::new(), |ratio| {
        format!("; decode gets {:.2} of raw ({:.2}–{:.2})", ratio.median, ratio.min, ratio.max)
    });
    let statistic = format!("median, minimum to maximum of rounds{decode}");
    Plot {
        title: "Random reads of whole experts".to_owned(),
        subtitle: subtitle(record, &statistic),
        x: "reads at a time",
        labels: depths.iter().map(usize::to_string).collect(),
        panels: vec![
            panel("10⁹ bytes a second", &|row| row.gb_per_second),
            panel("99 of 100 reads took at most, ms", &|row| row.p99_ms),
        ],
    }
}

fn scaled(spread: &Spread, scale: f64) -> Spread {
    let Spread { median, min, max, n } = *spread;
    Spread { median: median * scale, min: min * scale, max: max * scale, n }
}

fn subtitle(record: &Record, statistic: &str) -> String {
    let word = |key: &str| record.model.get(key).and_then(serde_json::Value::as_str).unwrap_or_default();
    let name = word("path").rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
    let refused = if record.refused.is_some() { "REFUSED; " } else { "" };
    let job = match record.runs.is_empty() {
        true => String::new(),
        false => format!(", page cache {}, {} tokens a prompt", record.job.page_cache, record.job.tokens),
    };
    format!("{refused}{name} ({}){job}; {statistic}", word("model_type"))
}

fn draw<'a>(plot: &Plot, text: &'a mut String) -> Drawn<'a> {
    let height = TITLE + PANEL * plot.panels.len() as u32;
    let root = SVGBackend::with_string(text, (WIDTH, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, body) = root.split_vertically(TITLE);
    head.draw(&Text::new(plot.title.clone(), (20, 10), ("sans-serif", 22)))?;
    head.draw(&Text::new(plot.subtitle.clone(), (20, 38), ("sans-serif", 13)))?;
    draw_legend(&head, &plot.panels[0].series)?;
    let last = plot.panels.len().saturating_sub(1);
    for (at, (panel, area)) in plot.panels.iter().zip(body.split_evenly((plot.panels.len(), 1))).enumerate() {
        draw_panel(plot, panel, &area, at == last)?;
    }
    root.present()
}

fn draw_panel<'a>(plot: &Plot, panel: &Panel, area: &Area<'a>, last: bool) -> Drawn<'a> {
    let top = panel.series.iter().flat_map(|series| &series.points).map(|point| point.y.max);
    let top = top.fold(0.0, f64::max);
    let top = if top > 0.0 { top * 1.08 } else { 1.0 };
    let width = plot.labels.len() as f64;
    let mut chart = ChartBuilder::on(area)
        .margin_left(12)
        .margin_right(24)
        .margin_bottom(8)
        .x_label_area_size(46)
        .y_label_area_size(72)
        .build_cartesian_2d(-0.5..width - 0.5, 0.0..top)?;
    let label = |x: &f64| {
        let whole = (x - x.round()).abs() < 1e-6 && *x > -0.5;
        let label = plot.labels.get(x.round().max(0.0) as usize).filter(|_| whole);
        label.cloned().unwrap_or_default()
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .x_labels(plot.labels.len().max(2) * 2)
        .x_label_formatter(&label)
        .x_desc(if last { plot.x } else { "" })
        .y_desc(panel.y)
        .y_label_formatter(&|y| number(*y))
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 14))
        .draw()?;
    let lines = panel.series.iter().filter(|series| series.line).count();
    for (at, series) in panel.series.iter().enumerate() {
        // Series over the same places stand side by side, so that no bar hides another.
        let beside = if lines > 1 { BESIDE * (at as f64 - (lines - 1) as f64 / 2.0) } else { 0.0 };
        draw_series(&mut chart, series, beside)?;
    }
    Ok(())
}

fn draw_series<'b>(chart: &mut Chart<'_, 'b>, series: &Series, beside: f64) -> Drawn<'b> {
    let colour = series.colour;
    if series.line {
        let path: Vec<(f64, f64)> =
            series.points.iter().map(|point| (point.x + beside, point.y.median)).collect();
        chart.draw_series([PathElement::new(path, colour.mix(0.5).stroke_width(1))])?;
    }
    let bars = series.points.iter().flat_map(|Point { x, y }| {
        let x = x + beside;
        let line = |path: Vec<(f64, f64)>| PathElement::new(path, colour.stroke_width(2));
        [
            line(vec![(x, y.min), (x, y.max)]),
            line(vec![(x - END, y.min), (x + END, y.min)]),
            line(vec![(x - END, y.max), (x + END, y.max)]),
        ]
    });
    chart.draw_series(bars)?;
    let points =
        series.points.iter().map(|point| Circle::new((point.x + beside, point.y.median), 4, colour.filled()));
    chart.draw_series(points)?;
    Ok(())
}

/// Names of the series from the right end of the title on to the left.
fn draw_legend<'a>(head: &Area<'a>, series: &[Series]) -> Drawn<'a> {
    let mut x = WIDTH as i32 - 24;
    for Series { name, colour, .. } in series.iter().rev().filter(|series| !series.name.is_empty()) {
        x -= 34 + 7 * name.chars().count() as i32;
        head.draw(&Circle::new((x, 20), 4, colour.filled()))?;
        head.draw(&Text::new(name.clone(), (x + 10, 13), ("sans-serif", 13)))?;
    }
    Ok(())
}

/// A number of an axis without needless zeros.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
