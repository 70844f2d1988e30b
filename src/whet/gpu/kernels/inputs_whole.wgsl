// Four inputs of a row of x, from i on, in rows of whole blocks.
@group(0) @binding(1) var<storage, read> x: array<vec4f>;

fn inputs(row: u32, i: u32) -> vec4f { return x[(row * X_STRIDE + i) / 4u]; }
fn up_inputs(row: u32, i: u32) -> vec4f {  // of rows of gate and up projections
  return x[(row * X_STRIDE + K + i) / 4u];
}
