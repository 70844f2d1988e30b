// Four inputs of a row of x, from i on, with zeros after the last.
@group(0) @binding(1) var<storage, read> x: array<f32>;

fn input(row: u32, i: u32) -> f32 {
  if (i < K) { return x[row * X_STRIDE + i]; }
  return 0.0;
}
fn inputs(row: u32, i: u32) -> vec4f {
  return vec4f(input(row, i), input(row, i + 1u), input(row, i + 2u), input(row, i + 3u));
}
fn up_input(row: u32, i: u32) -> f32 {
  if (i < K) { return x[row * X_STRIDE + K + i]; }
  return 0.0;
}
fn up_inputs(row: u32, i: u32) -> vec4f {  // of rows of gate and up projections
  return vec4f(up_input(row, i), up_input(row, i + 1u), up_input(row, i + 2u), up_input(row, i + 3u));
}
