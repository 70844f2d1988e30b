// The token of a row is the one that was drawn after the step before.
@group(0) @binding(0) var<storage, read> drawn: array<vec2u>;
@group(0) @binding(1) var<storage, read_write> tokens: array<vec4i>;

@compute @workgroup_size(1)
fn main(@builtin(workgroup_id) group: vec3u) { tokens[group.y].x = i32(drawn[group.y].x); }
