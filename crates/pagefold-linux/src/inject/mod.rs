//! Runs system calls inside other processes, and leaves no trace.
