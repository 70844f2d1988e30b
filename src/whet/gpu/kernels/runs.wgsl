// Consecutive tokens of a sequence in a step: the first and their number, the states before them (-1: none) and after
// them, and the first one's position.
struct Run { first: u32, n: u32, before: i32, after: i32, start: u32 }
