//! Reads SVG images, for tests.

/// The texts of an SVG image, in order.
pub fn texts(svg: &str) -> Vec<String> {
    let document = roxmltree::Document::parse(svg).unwrap_or_else(|error| panic!("{error}\n{svg}"));
    let mut texts = Vec::new();
    for node in document.descendants() {
        let text = node.text().unwrap_or_default().trim();
        if node.has_tag_name("text") && !text.is_empty() {
            texts.push(text.to_owned());
        }
    }
    texts
}

/// The number of elements of a kind with this colour as stroke or fill.
pub fn elements(svg: &str, kind: &str, colour: &str) -> usize {
    let document = roxmltree::Document::parse(svg).unwrap_or_else(|error| panic!("{error}\n{svg}"));
    let mut count = 0;
    for node in document.descendants() {
        let has = |name: &str| matches!(node.attribute(name), Some(of) if of.eq_ignore_ascii_case(colour));
        if node.has_tag_name(kind) && (has("stroke") || has("fill")) {
            count += 1;
        }
    }
    count
}
