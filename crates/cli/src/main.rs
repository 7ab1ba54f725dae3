//! The rfs command.
fn main() {}
