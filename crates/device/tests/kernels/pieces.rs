//! Norms, copies, sums, rotation and routing.

use metaltail_device::kernels::{
    Combination, KernelDevice, KernelError, NO_EXPERT, Norm, Reference, Rope, Router, Routes, Strided,
};

use crate::data::{Numbers, Outcome, ROUNDING, near, same, written};

/// Rows and widths of norms: one number, less than a SIMD group, partial ones, more than a thread has.
const NORMS: [(usize, usize); 6] = [(1, 1), (2, 31), (3, 32), (1, 257), (4, 1000), (2, 6144)];

/// Rows with and without gaps.
fn strides(rows: usize, width: usize) -> [Strided; 2] {
    [Strided::dense(rows, width), Strided { rows, width, from: width + 7, to: width + 3 }]
}

/// Runs an operation whose result lies in strides: every row is written, what lies between is not.
fn in_rows(
    what: &str,
    strided: &Strided,
    operation: impl FnOnce(&mut [f32]) -> Result<(), KernelError>,
) -> Result<Vec<f32>, String> {
    let gap = 12345.0;
    let mut all = vec![gap; strided.rows * strided.to];
    operation(&mut all).map_err(|error| format!("{what}: {error}"))?;
    if let Some(row) = all.chunks(strided.to).position(|row| row[strided.width..].iter().any(|v| *v != gap)) {
        return Err(format!("{what}: something was written behind row {row}"));
    }
    Ok(all.chunks(strided.to).flat_map(|row| &row[..strided.width]).copied().collect())
}

pub fn norms_agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    let mut reference = Reference::new().unwrap();
    for (rows, width) in NORMS {
        for strided in strides(rows, width) {
            let mut numbers = Numbers::new((rows * width) as u64);
            let (x, weight) = (numbers.floats(rows * strided.from), numbers.floats(width));
            let what = format!("a norm of {strided:?}");
            let norm = Norm { strided, weight: &weight, eps: 1e-6 };
            let got = in_rows(&what, &strided, |out| device.rms_norm(&norm, &x, out))?;
            let wanted = in_rows(&what, &strided, |out| reference.rms_norm(&norm, &x, out))?;
            // Squares are positive, so the sum is off by no more than its longest chain of roundings (256 threads at
            // least 32 of which add); the root halves that; the rest is the division and the products.
            let share = ROUNDING * (width as f64 / 32.0 + 16.0);
            near(&what, &got, &wanted, |i| share * f64::from(wanted[i].abs()))?;
        }
    }
    Ok(())
}

/// Also of rows far from zero, where the square of the mean is a thousand times the variance, and of rows that hardly
/// vary, where `eps` counts.
pub fn layer_norms_agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    let mut reference = Reference::new().unwrap();
    for (rows, width) in NORMS {
        for (at, spread) in [(0.0f32, 1.0f32), (30.0, 1.0), (0.0, 1e-3)] {
            for strided in strides(rows, width) {
                let mut numbers = Numbers::new((rows * width) as u64 + at as u64);
                let mut x = numbers.floats(rows * strided.from);
                x.iter_mut().for_each(|v| *v = at + spread * *v);
                let (weight, bias) = (numbers.floats(width), numbers.floats(width));
                let what = format!("a layer norm of {strided:?} around {at} ± {spread}");
                let norm = Norm { strided, weight: &weight, eps: 1e-5 };
                let got = in_rows(&what, &strided, |out| device.layer_norm(&norm, &bias, &x, out))?;
                let wanted = in_rows(&what, &strided, |out| reference.layer_norm(&norm, &bias, &x, out))?;
                // The mean is off by its chain of roundings, times the mean magnitude, and moves every number by as
                // much; the variance hears of that only squared. The rest is as for the other norm.
                let chain = ROUNDING * (width as f64 / 32.0 + 16.0);
                near(&what, &got, &wanted, |i| {
                    let row = &x[i / width * strided.from..][..width];
                    let [mean, variance] = moments(row);
                    let moved = chain * row.iter().map(|v| f64::from(v.abs())).sum::<f64>() / width as f64;
                    let factor = 1.0 / (variance + 1e-5).sqrt();
                    let (w, b) = (f64::from(weight[i % width].abs()), f64::from(bias[i % width].abs()));
                    let apart = (f64::from(row[i % width]) - mean).abs();
                    let share = chain + (moved * factor).powi(2);
                    w * factor * (2.0 * moved + apart * share) + 4.0 * ROUNDING * (w * factor * apart + b)
                })?;
            }
        }
    }
    Ok(())
}

/// Mean and variance.
fn moments(row: &[f32]) -> [f64; 2] {
    let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / row.len() as f64;
    let variance = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / row.len() as f64;
    [mean, variance]
}

/// Bit by bit, NaNs and subnormals too, and nothing between the rows.
pub fn copies_are_bits(device: &mut dyn KernelDevice) -> Outcome {
    for (rows, width) in [(1, 1), (3, 31), (5, 300), (2, 1000)] {
        for strided in strides(rows, width) {
            let mut numbers = Numbers::new(width as u64);
            let from: Vec<f32> = (0..rows * strided.from).map(|_| f32::from_bits(numbers.next())).collect();
            let what = format!("a copy of {strided:?}");
            let got = in_rows(&what, &strided, |to| device.copy(&strided, &from, to))?;
            let wanted = from.chunks(strided.from).flat_map(|row| &row[..width]);
            if !got.iter().map(|v| v.to_bits()).eq(wanted.map(|v| v.to_bits())) {
                return Err(format!("{what}: the bits differ"));
            }
        }
    }
    Ok(())
}

/// One rounding: the same bits everywhere.
pub fn sums_agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    for count in [1, 31, 256, 2000] {
        let mut numbers = Numbers::new(count as u64);
        let (from, to) = (numbers.floats(count), numbers.floats(count + 9));
        let (mut got, mut wanted) = (to.clone(), to.clone());
        device.add(&from, &mut got).map_err(|error| error.to_string())?;
        Reference::new().unwrap().add(&from, &mut wanted).map_err(|error| error.to_string())?;
        same(&format!("{count} sums"), &got, &wanted)?;
    }
    Ok(())
}

/// Fused terms in one order: the same bits everywhere. A weight of zero leaves a product unread, whatever it is; the
/// last case has more weights than constants of a launch.
pub fn combinations_agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    for (rows, top_k, width) in [(1, 1, 1), (3, 4, 37), (2, 8, 300), (4, 6, 1000), (150, 8, 40)] {
        for with_shared in [false, true] {
            let mut numbers = Numbers::new((rows * width) as u64);
            let mut weights = numbers.floats(rows * top_k);
            let mut products = numbers.floats(rows * top_k * width);
            for at in (2..weights.len()).step_by(5) {
                weights[at] = 0.0;
                products[at * width..(at + 1) * width].fill(f32::NAN);
            }
            let shared = with_shared.then(|| numbers.floats(rows * width));
            let x = numbers.floats(rows * width + 5);
            let shared = shared.as_deref();
            let combination = Combination { weights: &weights, top_k, products: &products, shared, width };
            let what = format!("{rows} rows of {width} with {top_k} experts, shared {with_shared}");
            let (mut got, mut wanted) = (x.clone(), x);
            device.combine(&combination, &mut got).map_err(|error| format!("{what}: {error}"))?;
            Reference::new()
                .unwrap()
                .combine(&combination, &mut wanted)
                .map_err(|error| error.to_string())?;
            same(&what, &got, &wanted)?;
        }
    }
    Ok(())
}

pub fn gates_agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    let mut reference = Reference::new().unwrap();
    for count in [1, 31, 256, 2000] {
        let mut numbers = Numbers::new(count as u64);
        let gate: Vec<f32> = numbers.floats(count).iter().map(|v| v * 20.0).collect();
        let up = numbers.floats(count);
        let what = format!("{count} gates");
        let got = written(&what, count, |out| device.swiglu(&gate, &up, out))?;
        let wanted = written(&what, count, |out| reference.swiglu(&gate, &up, out))?;
        near(&what, &got, &wanted, |i| 8.0 * ROUNDING * f64::from(wanted[i].abs()))?;
    }
    let gate = [-1e4f32, 1e4, f32::NAN, 0.0, -0.0, f32::MIN];
    let got = written("extreme gates", 6, |out| device.swiglu(&gate, &[1.0; 6], out))?;
    near("extreme gates", &got, &[-0.0, 1e4, f32::NAN, 0.0, -0.0, -0.0], |_| 0.0)
}

/// Angles of `rows` positions.
fn angles(rows: usize, half: usize) -> (Vec<f32>, Vec<f32>) {
    let angle = |i: usize| (i / half + 1) as f64 * 10_000f64.powf(-((i % half) as f64) / half as f64);
    (0..rows * half).map(|i| (angle(i).cos() as f32, angle(i).sin() as f32)).unzip()
}

pub fn rotations_agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    let mut reference = Reference::new().unwrap();
    for (rows, heads, head, offset, dim) in
        [(1, 1, 2, 0, 2), (2, 3, 10, 3, 6), (3, 4, 192, 128, 64), (1, 2, 130, 0, 130), (2, 1, 700, 50, 600)]
    {
        for interleaved in [true, false] {
            let (cosines, sines) = angles(rows, dim / 2);
            let rope = Rope { heads, head, offset, cosines: &cosines, sines: &sines, dim, interleaved };
            let x = Numbers::new(dim as u64).floats(rows * heads * head + 5);
            let (mut got, mut wanted) = (x.clone(), x.clone());
            device.rope(&rope, &mut got).map_err(|error| error.to_string())?;
            reference.rope(&rope, &mut wanted).map_err(|error| error.to_string())?;
            let what = format!("{rows} × {heads} heads of {head}, {dim} from {offset}, {interleaved}");
            // Two products and a sum, or a product and a fused sum: three roundings of numbers below 2.
            near(&what, &got, &wanted, |_| 6.0 * ROUNDING)?;
            for (at, (got, was)) in got.iter().zip(&x).enumerate() {
                let inside = at < rows * heads * head && (offset..offset + dim).contains(&(at % head));
                if !inside && got.to_bits() != was.to_bits() {
                    return Err(format!("{what}: number {at} is none of the rotation's, but changed"));
                }
            }
        }
    }
    Ok(())
}

fn router(experts: usize, top_k: usize, softmax: bool) -> Router<'static> {
    Router { experts, top_k, softmax, bias: None, groups: None, normalise: true, scale: 2.5 }
}

/// The same ids; weights within what eˣ and a division may differ by.
fn routes_agree(device: &mut dyn KernelDevice, what: &str, router: &Router<'_>, logits: &[f32]) -> Outcome {
    let run = |device: &mut dyn KernelDevice| {
        device.route(router, logits).map_err(|error| format!("{what}: {error}"))
    };
    let (got, wanted): (Routes, Routes) = (run(device)?, run(&mut Reference::new().unwrap())?);
    if got.ids != wanted.ids {
        return Err(format!("{what}: chose {:?}, wanted {:?}", got.ids, wanted.ids));
    }
    if got.broken != wanted.broken {
        return Err(format!("{what}: broken {:?}, wanted {:?}", got.broken, wanted.broken));
    }
    near(what, &got.weights, &wanted.weights, |i| 32.0 * ROUNDING * f64::from(wanted.weights[i]))
}

/// Logits on a coarse grid: two scores are equal, or further apart than any two devices' eˣ.
fn coarse(numbers: &mut Numbers, count: usize) -> Vec<f32> {
    (0..count).map(|_| numbers.below(200) as f32 / 16.0 - 6.0).collect()
}

pub fn routes_agree_with_the_reference(device: &mut dyn KernelDevice) -> Outcome {
    for (experts, top_k) in [(1, 1), (5, 5), (24, 4), (64, 6), (168, 8), (256, 8), (257, 11), (512, 32)] {
        let mut numbers = Numbers::new(experts as u64);
        let logits = coarse(&mut numbers, 5 * experts);
        let bias: Vec<f32> = (0..experts).map(|_| numbers.below(64) as f32 / 64.0).collect();
        for softmax in [false, true] {
            for bias in [None, Some(&bias[..])] {
                for normalise in [false, true] {
                    let router = Router { bias, normalise, ..router(experts, top_k, softmax) };
                    let biased = bias.is_some();
                    let what = format!("{top_k} of {experts}, softmax {softmax}, bias {biased}");
                    routes_agree(device, &what, &router, &logits)?;
                }
            }
        }
    }
    Ok(())
}

pub fn routes_stay_in_the_best_groups(device: &mut dyn KernelDevice) -> Outcome {
    for (experts, groups, kept, top_k) in
        [(24, 3, 1, 4), (256, 8, 4, 8), (168, 168, 5, 8), (64, 4, 4, 6), (12, 6, 2, 4)]
    {
        let mut numbers = Numbers::new((experts + groups) as u64);
        let logits = coarse(&mut numbers, 4 * experts);
        let bias: Vec<f32> = (0..experts).map(|_| numbers.below(64) as f32 / 64.0).collect();
        let router =
            Router { groups: Some((groups, kept)), bias: Some(&bias), ..router(experts, top_k, false) };
        routes_agree(
            device,
            &format!("{top_k} of {experts} in {kept} of {groups} groups"),
            &router,
            &logits,
        )?;
    }
    let few = Router { groups: Some((4, 1)), ..router(8, 5, false) };
    let routes = device.route(&few, &coarse(&mut Numbers::new(1), 8)).map_err(|error| error.to_string())?;
    match routes.ids[2..] == [NO_EXPERT; 3] && routes.weights[2..] == [0.0; 3] {
        true => Ok(()),
        false => Err(format!("two experts are allowed, five asked for: {routes:?}")),
    }
}

/// Of equal choices the lowest id; subnormal choices are no zeros.
pub fn routes_break_ties_by_the_lowest_id(device: &mut dyn KernelDevice) -> Outcome {
    for experts in [24usize, 168, 256, 257] {
        for softmax in [false, true] {
            let router = router(experts, 8, softmax);
            let mut numbers = Numbers::new(experts as u64);
            routes_agree(device, "all equal", &router, &vec![0.25; 2 * experts])?;
            let few: Vec<f32> = (0..3 * experts).map(|_| numbers.below(3) as f32).collect();
            routes_agree(device, "three values", &router, &few)?;
            let zeros: Vec<f32> = (0..experts).map(|e| [0.0f32, -0.0][e % 2]).collect();
            routes_agree(device, "zeros of both signs", &router, &zeros)?;
            let tiny = |e: usize| f32::from_bits(1 + (e as u32 * 37) % 5) * [1.0, -1.0][e % 2];
            routes_agree(device, "subnormal logits", &router, &(0..experts).map(tiny).collect::<Vec<_>>())?;
            // Scores of 0, but for the biases, which decide and are subnormal.
            let bias: Vec<f32> =
                (0..experts).map(|e| f32::from_bits((e as u32 * 7919) % 1000 * 64)).collect();
            let mut low = vec![-1000.0f32; experts];
            low[experts / 2] = if softmax { 1000.0 } else { 0.0 };
            let biased = Router { bias: Some(&bias), ..router };
            routes_agree(device, "subnormal choices", &biased, &low)?;
        }
    }
    Ok(())
}

pub fn routes_survive_damaged_logits(device: &mut dyn KernelDevice) -> Outcome {
    for softmax in [false, true] {
        let router = router(40, 6, softmax);
        let mut logits = coarse(&mut Numbers::new(2), 5 * 40);
        logits[..40].fill(f32::NAN);
        for (at, bad) in [(40, f32::NAN), (95, f32::INFINITY), (130, f32::NEG_INFINITY), (159, f32::NAN)] {
            logits[at] = bad;
        }
        // More damaged ones than sound ones: the lowest ids follow with weight zero.
        logits[163..200].fill(f32::NEG_INFINITY);
        routes_agree(device, "damaged logits", &router, &logits)?;
        // Others' choices below zero: a damaged one has to lose against those, too.
        let bias: Vec<f32> = (0..40).map(|expert| if expert % 5 == 0 { 0.0 } else { -2.0 }).collect();
        let biased = Router { bias: Some(&bias), ..router };
        routes_agree(device, "damaged logits with biases", &biased, &logits)?;
        let large: Vec<f32> = (0..40).map(|e| [f32::MAX, f32::MIN, 88.0, -88.0][e % 4]).collect();
        routes_agree(device, "the largest logits", &router, &large)?;
    }
    Ok(())
}

/// Rows do not see each other.
pub fn rows_are_independent(device: &mut dyn KernelDevice) -> Outcome {
    let mut numbers = Numbers::new(8);
    let (x, weight) = (numbers.floats(5 * 300), numbers.floats(300));
    let mut norm = |x: &[f32]| {
        let strided = Strided::dense(x.len() / 300, 300);
        written("a norm", x.len(), |out| {
            device.rms_norm(&Norm { strided, weight: &weight, eps: 1e-5 }, x, out)
        })
    };
    let all = norm(&x)?;
    for (row, x) in x.chunks(300).enumerate() {
        same("a row's norm alone", &norm(x)?, &all[row * 300..][..300])?;
    }
    let (logits, router) = (coarse(&mut numbers, 5 * 64), router(64, 6, true));
    let mut route = |logits: &[f32]| device.route(&router, logits).map_err(|error| error.to_string());
    let all = route(&logits)?;
    for (row, logits) in logits.chunks(64).enumerate() {
        let alone = route(logits)?;
        if alone.ids != all.ids[row * 6..][..6] {
            return Err(format!("row {row} alone chooses {:?}", alone.ids));
        }
        same("a row's weights alone", &alone.weights, &all.weights[row * 6..][..6])?;
    }
    Ok(())
}
