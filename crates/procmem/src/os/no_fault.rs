//! The points of fault injection, for builds without fault injection: they do nothing.

use std::io;

pub fn init() {}

pub fn point(_name: &str) {}

pub fn point_of(_name: &str, _of: &str) {}

pub fn io(_name: &str) -> io::Result<()> {
    Ok(())
}

pub fn io_of(_name: &str, _of: &str) -> io::Result<()> {
    Ok(())
}
