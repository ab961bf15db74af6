//! What is made of the program of a datatype that a peer wrote.

use posthaste_protocols::datatype::{Datatype, Layout, Machine};

/// Longest memory in bytes in which a program is run.
const MEMORY: i128 = 1 << 17;

/// Reads a data gather/scatter program. Where it is accepted, it must come out as it went in, do what it declares, and
/// keep to its bounds; where it is not, nothing is done.
pub fn program(data: &[u8]) {
    // Half of the inputs would not get beyond the magic number otherwise.
    let headed;
    let bytes = match data.split_first() {
        Some((0, rest)) => {
            headed = [b"DGSP\x01", rest].concat();
            &headed[..]
        }
        _ => data,
    };
    let Ok(datatype) = Datatype::from_bytes(bytes) else { return };
    let again = Datatype::from_bytes(&datatype.to_bytes()).expect("an accepted program is accepted again");
    assert_eq!(again.signature(), datatype.signature());
    assert_eq!((again.size(), again.true_bounds()), (datatype.size(), datatype.true_bounds()));
    let (low, high) = datatype.span(1);
    let base = -low.min(0);
    let len = high.max(0) + base;
    if len > MEMORY || i128::from(datatype.size()) > MEMORY {
        return;
    }
    let layout = Layout::new(&datatype, 1).at(base as u64);
    let mut memory = vec![7; len as usize];
    let mut machine = Machine::new(&layout).expect("its bounds are small");
    let mut staging = [0; 61];
    let mut left = datatype.size();
    while left > 0 {
        let count = machine.gather(&memory, &mut staging).expect("the memory is as long as it must be");
        assert_eq!(count, left.min(61));
        assert!(staging[..count as usize].iter().all(|byte| *byte == 7));
        left -= count;
    }
    let data = vec![9; datatype.size() as usize];
    let mut machine = Machine::new(&layout).expect("as before");
    assert_eq!(machine.scatter(&mut memory, &data), Ok(datatype.size()));
    assert_eq!(memory.contains(&9), datatype.size() > 0);
    if high > 0 {
        let mut machine = Machine::new(&layout).expect("as before");
        machine.gather(&memory[..len as usize - 1], &mut staging).expect_err("the memory is too short");
    }
}
