// A float32 scale of each output after all steps.
fn scales(panel: u32, step: u32, j: u32) -> vec4f {
  let scale = bitcast<f32>(weights[panel * PANEL_WORDS + 128u * PANEL_STEPS + j]);
  return vec4f(scale, scale, 0.0, 0.0);
}
