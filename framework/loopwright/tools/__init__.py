"""Programs and instruments around the loop; a run needs none of them."""
