"""Memory that holds bytes: device slabs, the host pool, timelines and copy streams behind one seam."""
