from etude.cli import main

raise SystemExit(main())
