use super::*;

fn run(source: &str) -> Result<String, TranslateError> {
    translate(source, "x.metal", "", Purpose::Run)
}

fn refused(source: &str) -> String {
    run(source).unwrap_err().to_string()
}

#[test]
fn a_kernel_is_registered_with_its_buffers_and_builtins() {
    let source =
        "kernel void f(device float* y [[buffer(2)]], uint i [[thread_position_in_grid]]) { y[i] = 1; }";
    let cpp = run(source).unwrap();
    assert!(cpp.contains("{{msl::Buf, 2}, {msl::PosInGrid, 0}}"), "{cpp}");
    assert!(cpp.contains("msl_r0(\"f\""), "{cpp}");
    assert!(!cpp.contains("[[buffer"), "{cpp}");
}

#[test]
fn a_prefix_names_the_kernels_of_a_second_copy() {
    let cpp = translate("kernel void f(device float* y) { }", "x.metal", "other_", Purpose::Run).unwrap();
    assert!(cpp.contains("\"other_f\""), "{cpp}");
    assert!(cpp.contains("namespace kother_x_metal"), "{cpp}");
}

#[test]
fn an_instantiation_takes_the_parameters_of_its_template() {
    let source = "template <uint N> kernel void f(device float* y) { }\n\
                  template [[host_name(\"f_\" \"3\")]] [[kernel]] decltype(f<3>) f<3>;";
    let cpp = run(source).unwrap();
    assert!(cpp.contains("\"f_3\""), "{cpp}");
    assert!(cpp.contains("&f < 3 >"), "{cpp}");
    assert!(refused(source.split_once('\n').unwrap().1).contains("no kernel template f before this"));
}

#[test]
fn threadgroup_variables_become_one_copy_that_starts_as_nan() {
    let cpp = run("kernel void f(device float* y) { threadgroup float a[4], b; y[0] = a[0]; }").unwrap();
    assert!(cpp.contains("static thread_local "), "{cpp}");
    assert!(
        cpp.contains("msl::tg_var(&a, sizeof(a))") && cpp.contains("msl::tg_var(&b, sizeof(b))"),
        "{cpp}"
    );
}

#[test]
fn the_size_of_a_threadgroup_variable_may_be_a_product_and_a_pointer_is_none() {
    let product = run("kernel void f(device float* y) { threadgroup float a[N * 4]; y[0] = a[0]; }").unwrap();
    assert!(product.contains("msl::tg_var(&a, sizeof(a))"), "{product}");
    let pointer = run("void f(threadgroup float* a) { threadgroup float* b; b = a; }").unwrap();
    assert!(!pointer.contains("tg_var"), "{pointer}");
}

#[test]
fn vector_casts_are_spelled_out() {
    assert!(run("void f() { float4 a = (float4)b; }").unwrap().contains("msl::Cast<float4>{} ->* "));
}

#[test]
fn what_metal_refuses_is_refused_with_its_line() {
    let twice = "\nkernel void f(device float* a [[buffer(0)]], device float* b [[buffer(0)]]) { }";
    assert_eq!(refused(twice), "x.metal:2: buffer(0) is used twice");
    let no_space = "kernel void f(float* a [[buffer(0)]]) { }";
    assert!(refused(no_space).contains("a buffer parameter must be device or constant"));
    assert!(refused(no_space).contains("pointer or reference without an address space"));
    let high = "kernel void f(device float* a [[buffer(31)]]) { }";
    assert!(refused(high).contains("must be at most 30"));
    let lane = "kernel void f(float lane [[thread_index_in_simdgroup]]) { }";
    assert!(refused(lane).contains("cannot be of type float"));
    let unknown = "kernel void f(uint a [[amplification_id]]) { }";
    assert!(refused(unknown).contains("not known to the shim"));
    assert!(refused("kernel void f(uint a) { }").contains("without an attribute"));
}

#[test]
fn text_that_makes_no_sense_is_no_panic() {
    for source in [
        "kernel",
        "kernel void",
        "kernel {",
        "kernel void f(",
        "kernel void f( {",
        "[[",
        "[[threadgroup",
        "(",
        "{ threadgroup",
        "{ threadgroup ;",
        "{ threadgroup [ ;",
        "constant",
        "constant [[function_constant",
        "constant function_constant ;",
        "template [[host_name(\"x\")]] kernel ;",
        "[[host_name(\"x\")]] kernel <>;",
        "host_name kernel ;",
        ")",
        "}",
        "kernel void f(,) { }",
        "kernel void f([[ ]]) { }",
        "kernel void f([[) { }",
        "kernel host_name {",
        "( float4 )",
        "host_name(",
        "host_name kernel {",
        "kernel void ( device [[ buffer ( ] ) ) {",
    ] {
        let _ = run(source);
        let _ = translate(source, "", "", Purpose::AddressSpaces);
    }
}
