"""What speaks to other systems in their own words, one file each."""
