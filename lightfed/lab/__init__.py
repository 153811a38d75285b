"""Many runs: reading results, drawing, pages, comparisons, studies, sweeps, previews."""
