//! Slurm's form of a list of hosts, `login,node[1-3,07]-ib[0-1]`.

/// The first host of a list; none if the list has another form.
///
/// The whole list is checked, and never expanded: a few bytes may name millions of hosts.
pub(super) fn first_host(list: &str) -> Option<String> {
    let (first, mut rest) = take_host(list)?;
    while let Some(more) = rest.strip_prefix(',') {
        rest = take_host(more)?.1;
    }
    rest.is_empty().then_some(first)
}

/// The first host that one element of a list names, and what follows the element.
fn take_host(list: &str) -> Option<(String, &str)> {
    let mut host = String::new();
    let mut rest = list;
    while let Some(next) = rest.chars().next().filter(|next| *next != ',') {
        if next == '[' {
            let (ranges, behind) = rest[1..].split_once(']')?;
            host.push_str(first_number(ranges)?);
            rest = behind;
        } else {
            let plain = next.is_ascii_alphanumeric() || ".-_".contains(next);
            host.push(plain.then_some(next)?);
            rest = &rest[1..];
        }
    }
    (1..=255).contains(&host.len()).then_some((host, rest))
}

/// The first number of `1-3,07`, with its zeros.
fn first_number(ranges: &str) -> Option<&str> {
    let digits =
        |text: &str| (1..=18).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    for range in ranges.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let in_order = || low.parse::<u64>().ok() <= high.parse::<u64>().ok();
        if !digits(low) || !digits(high) || !in_order() {
            return None;
        }
    }
    ranges.split([',', '-']).next()
}

#[cfg(test)]
mod tests {
    use super::first_host;
    use proptest::prelude::*;

    #[test]
    fn the_first_host_of_every_form() {
        for (list, first) in [
            ("vm", "vm"),
            ("node[1-3,7]", "node1"),
            ("node[007-010]", "node007"),
            ("a.example.org,b", "a.example.org"),
            ("rack[2,4]-n[08-10].ib,x", "rack2-n08.ib"),
            ("n[5]", "n5"),
            ("[1-2]", "1"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(first), "{list}");
        }
        for broken in [
            "", ",", "a,", ",a", "n[", "n[]", "n]", "n[1", "n[1-]", "n[-1]", "n[3-1]", "n[1,]", "n[a]", "a b",
        ] {
            assert_eq!(first_host(broken), None, "{broken}");
        }
        assert_eq!(first_host(&"a".repeat(256)), None);
    }

    proptest! {
        #[test]
        fn a_list_is_read_back(
            prefix in "[a-z][a-z0-9.-]{0,8}", low in 0u64..5000, width in 1usize..6, more in 0u64..5000,
            tail in "(,[a-z]{1,5}(\\[[0-9]{1,4}\\])?){0,4}",
        ) {
            let list = format!("{prefix}[{low:0width$}-{:0width$}]{tail}", low + more);
            prop_assert_eq!(first_host(&list), Some(format!("{prefix}{low:0width$}")));
            prop_assert_eq!(first_host(&format!("{prefix}{tail}")), Some(prefix));
        }

        #[test]
        fn anything_is_a_host_or_none(list in "[a-z0-9\\[\\],é -]{0,24}") {
            if let Some(host) = first_host(&list) {
                prop_assert!(!host.is_empty() && !host.contains(['[', ']', ',', ' ']), "{}", host);
            }
        }
    }
}
