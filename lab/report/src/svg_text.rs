//! Reads SVG images, for tests.

/// The texts of an SVG image, in order.
pub fn texts(svg: &str) -> Vec<String> {
    let document = roxmltree::Document::parse(svg).unwrap_or_else(|error| panic!("{error}\n{svg}"));
    let texts = document.descendants().filter(|node| node.has_tag_name("text"));
    texts.filter_map(|node| Some(node.text()?.trim().to_owned())).filter(|text| !text.is_empty()).collect()
}

/// The number of elements of a kind with this colour as stroke or fill.
pub fn elements(svg: &str, kind: &str, colour: &str) -> usize {
    let document = roxmltree::Document::parse(svg).unwrap_or_else(|error| panic!("{error}\n{svg}"));
    let is_colour = |node: &roxmltree::Node<'_, '_>| {
        [node.attribute("stroke"), node.attribute("fill")].iter().flatten().any(|of| of.eq_ignore_ascii_case(colour))
    };
    document.descendants().filter(|node| node.has_tag_name(kind) && is_colour(node)).count()
}
