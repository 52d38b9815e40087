<?php
/* Installs WordPress. Arguments: its directory, the number of posts to write, and the number of pictures in each post.
   All posts show the same pictures. Prints the numbers of the posts. */
[, $root, $posts, $pictures] = $argv;
define('WP_INSTALLING', true);
$_SERVER['HTTP_HOST'] = 'localhost:8080';
$_SERVER['REQUEST_METHOD'] = 'GET';
/* Sends no mail. */
function wp_new_blog_notification() {}
require "$root/wp-load.php";
require ABSPATH . 'wp-admin/includes/upgrade.php';
wp_install('Three sites', 'editor', 'editor@example.org', true, '', 'not a secret');
$words = explode(' ', 'pages that hold the same contents are kept once and copied when a program writes to them again');
for ($post = 1; $post <= $posts; $post++) {
    $text = '';
    for ($picture = 1; $picture <= $pictures; $picture++) {
        $text .= "<!-- wp:image --><figure class=\"wp-block-image\"><img src=\"/wp-content/uploads/$picture.png\" alt=\"\"/></figure><!-- /wp:image -->";
        for ($paragraph = 0; $paragraph < 4; $paragraph++) {
            $text .= '<!-- wp:paragraph --><p>';
            for ($word = 0; $word < 100; $word++) {
                $text .= $words[($post * 31 + $picture * 17 + $paragraph * 7 + $word * $word) % count($words)] . ' ';
            }
            $text .= '</p><!-- /wp:paragraph -->';
        }
    }
    $id = wp_insert_post(['post_title' => "Post $post", 'post_content' => $text, 'post_status' => 'publish'], true);
    if (is_wp_error($id)) {
        fwrite(STDERR, $id->get_error_message());
        exit(1);
    }
    echo "$id ";
}
