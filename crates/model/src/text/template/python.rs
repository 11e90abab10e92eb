//! Values as Python writes them: `str`, `repr` and `json.dumps`.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Containers nested deeper than this are refused rather than followed.
const MAX_DEPTH: usize = 256;

/// `str(value)`: texts as they are, everything else as `repr` has it.
pub(super) fn str(state: &State, value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_owned()),
        ValueKind::Undefined => Ok(String::new()),
        _ => {
            let mut out = String::new();
            repr(state, value, 0, &mut out)?;
            Ok(out)
        }
    }
}

/// Appends `repr(value)`.
fn repr(state: &State, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    charge(state, value, depth)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => push_number(value, ["nan", "inf", "-inf"], out),
        ValueKind::String => repr_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            let brackets = if value.is_tuple() { ['(', ')'] } else { ['[', ']'] };
            out.push(brackets[0]);
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(state, &item, depth + 1, out)?;
            }
            out.push_str(if value.is_tuple() && value.len() == Some(1) { "," } else { "" });
            out.push(brackets[1]);
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(state, &key, depth + 1, out)?;
                out.push_str(": ");
                repr(state, &value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Appends a text in quotes: single ones, unless it holds those and no double ones.
fn repr_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || c == '\x7f' => push_hex(out, "\\x", c as u32, 2),
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Appends a number; `special` are the names of not-a-number and the infinities.
fn push_number(value: &Value, special: [&str; 3], out: &mut String) {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => push_float(number, special, out),
        _ => out.push_str(&value.to_string()),
    }
}

/// Appends `repr` of a float: the shortest digits that read back, an exponent from 1e16 and below
/// 1e-4 (CPython's `float_repr_style = 'short'`).
fn push_float(number: f64, special: [&str; 3], out: &mut String) {
    if number.is_nan() {
        return out.push_str(special[0]);
    }
    if number.is_infinite() {
        return out.push_str(special[if number > 0.0 { 1 } else { 2 }]);
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        out.push_str(&format!("{number:?}"));
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        out.push_str(&format!("{digits}e{sign}{:02}", exponent.unsigned_abs()));
    }
}

/// How `json.dumps` was asked to write.
struct Style<'a> {
    state: &'a State<'a, 'a>,
    ascii: bool,
    /// Text of one level of indentation; `None` writes on one line.
    indent: Option<String>,
    sort: bool,
    item: String,
    colon: String,
}

/// `json.dumps(value, …)` with the options and defaults of transformers' `tojson`:
/// `ensure_ascii=False, indent=None, separators=None, sort_keys=False`.
pub(super) fn dumps(state: &State, value: &Value, options: &Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent.filter(|value| !value.is_none()) {
        None => None,
        Some(value) => Some(match value.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(value)?.min(64)),
        }),
    };
    let separators: Option<(String, String)> = match options.get::<Option<Value>>("separators")? {
        Some(value) if !value.is_none() => {
            let part = |i| value.get_item_by_index(i).map(|part| part.to_string());
            Some((part(0)?, part(1)?))
        }
        _ => None,
    };
    let default_item = if indent.is_some() { "," } else { ", " };
    let (item, colon) = separators.unwrap_or((default_item.to_owned(), ": ".to_owned()));
    let style = Style {
        state,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item,
        colon,
    };
    options.assert_all_used()?;
    let mut out = String::new();
    style.value(value, 0, &mut out)?;
    Ok(out)
}

impl Style<'_> {
    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        charge(self.state, value, depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => push_number(value, ["NaN", "Infinity", "-Infinity"], out),
            ValueKind::String => self.text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container(['[', ']'], &items, depth, out, |item, out| self.value(item, depth + 1, out))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.container(['{', '}'], &keys, depth, out, |key, out| {
                    self.key(key, out)?;
                    out.push_str(&self.colon);
                    self.value(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::BadSerialization,
                    format!("a value of type {kind} cannot be written as JSON"),
                ));
            }
        }
        Ok(())
    }

    /// Writes brackets around items, each on its own line where there is an indentation.
    fn container(
        &self,
        brackets: [char; 2],
        items: &[Value],
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(brackets[0]);
        for (i, item) in items.iter().enumerate() {
            out.push_str(if i > 0 { &self.item } else { "" });
            self.line(depth + 1, out);
            write(item, out)?;
        }
        if !items.is_empty() {
            self.line(depth, out);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    /// Keys are texts; numbers, booleans and none become texts as Python makes them.
    fn key(&self, key: &Value, out: &mut String) -> Result<(), Error> {
        match key.as_str() {
            Some(text) => self.text(text, out),
            None => {
                out.push('"');
                self.value(key, 0, out)?;
                out.push('"');
            }
        }
        Ok(())
    }

    fn text(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\x08' => out.push_str("\\b"),
                '\x0c' => out.push_str("\\f"),
                c if (c as u32) < 0x20 => push_hex(out, "\\u", c as u32, 4),
                c if self.ascii && !c.is_ascii() => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        push_hex(out, "\\u", u32::from(*unit), 4);
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn push_hex(out: &mut String, prefix: &str, value: u32, width: usize) {
    // Writing to a String cannot fail.
    let _ = write!(out, "{prefix}{value:0width$x}");
}

/// Pays for writing one value, contents not counted, and refuses too deep a nesting. A value may be
/// shared a thousandfold within itself, so that writing it is worth more than having built it.
fn charge(state: &State, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        let message = format!("a value is nested deeper than {MAX_DEPTH} levels");
        return Err(Error::new(ErrorKind::BadSerialization, message));
    }
    let bytes = value.as_str().map_or(0, <str>::len) as u64;
    state.consume_fuel(1 + bytes / 64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::Environment;
    use minijinja::value::Serde;
    use serde_json::json;

    fn kwargs(pairs: &[(&str, Value)]) -> Kwargs {
        pairs.iter().map(|(name, value)| (*name, value.clone())).collect()
    }

    fn dumps(value: &Value, options: &Kwargs) -> Result<String, Error> {
        super::dumps(&Environment::new().empty_state(), value, options)
    }

    fn str(value: &Value) -> Result<String, Error> {
        super::str(&Environment::new().empty_state(), value)
    }

    fn value(json: serde_json::Value) -> Value {
        Value::from(Serde(json))
    }

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (number, want) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(dumps(&Value::from(number), &kwargs(&[])).unwrap(), want);
        }
    }

    #[test]
    fn json_is_written_as_json_dumps_does() {
        let tool = value(json!({"b": [1, 2.0, true, null], "a": {"é\"\n\u{7f}": "<𝄞>"}, "e": [], "o": {}}));
        assert_eq!(
            dumps(&tool, &kwargs(&[])).unwrap(),
            "{\"b\": [1, 2.0, true, null], \"a\": {\"é\\\"\\n\u{7f}\": \"<𝄞>\"}, \"e\": [], \"o\": {}}"
        );
        assert_eq!(
            dumps(&tool, &kwargs(&[("ensure_ascii", true.into()), ("sort_keys", true.into())])).unwrap(),
            "{\"a\": {\"\\u00e9\\\"\\n\u{7f}\": \"<\\ud834\\udd1e>\"}, \"b\": [1, 2.0, true, null], \"e\": [], \"o\": {}}"
        );
        assert_eq!(
            dumps(&value(json!({"a": [1, []]})), &kwargs(&[("indent", 2.into())])).unwrap(),
            "{\n  \"a\": [\n    1,\n    []\n  ]\n}"
        );
        let tight = value(json!([",", ":"]));
        assert_eq!(
            dumps(&value(json!({"a": [1, 2]})), &kwargs(&[("separators", tight)])).unwrap(),
            "{\"a\":[1,2]}"
        );
    }

    #[test]
    fn what_python_cannot_serialise_is_an_error() {
        assert!(dumps(&Value::UNDEFINED, &kwargs(&[])).is_err());
        assert!(dumps(&Value::from(1), &kwargs(&[("colour", 1.into())])).is_err());
    }

    #[test]
    fn printing_agrees_with_python() {
        let list = value(json!(["it's", "a\"b", "'\"", true, null, 1, {"k": 0.5}]));
        assert_eq!(str(&list).unwrap(), r#"["it's", 'a"b', '\'"', True, None, 1, {'k': 0.5}]"#);
        assert_eq!(str(&Value::UNDEFINED).unwrap(), "");
        assert_eq!(str(&Value::from("x\n")).unwrap(), "x\n");
    }
}
