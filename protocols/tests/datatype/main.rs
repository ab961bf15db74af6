//! Datatypes, their programs and their machines against a list of bytes that was made in the plainest way.

mod copying;
mod facts;
mod hostile;
mod oracle;
mod pairs;
