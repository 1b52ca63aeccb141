;;; Interatomic potentials from irreducible Cartesian tensors, as layers that can be rearranged (docs/flashcart.md).
;;;
;;; Features are [atoms (l+1)² channels]: rank 0 first, then 1, …; the components of a rank, then channels. A product that
;;; keeps its paths is [atoms width], and its `:paths` say how it divides.
(import "schedule")

;; --- ranks and paths

(defun top-rank (x)
  "The highest rank of features [… (l+1)² c], or of edge attributes [edges (l+1)²]. A number."
  (- (round (sqrt (dim x 1))) 1))

(defun up-to-rank (x l-max)
  "Features without the ranks above l-max: [n (l+1)² c] -> [n (l-max+1)² c]."
  (if (< l-max (top-rank x)) (slice x :axis 1 :start 0 :stop (* (+ l-max 1) (+ l-max 1))) x))

(defun scalars (x)
  "The rank 0 of features: [n (l+1)² c] -> [n c]."
  (reshape (up-to-rank x 0) [(dim x 0) (dim x 2)]))

(defun path-allowed (l1 l2 l3)
  "Whether ranks l1 and l2 make rank l3: |l1-l2| ≤ l3 ≤ l1+l2, and the sum is even. A boolean."
  (and (<= (abs (- l1 l2)) l3) (<= l3 (+ l1 l2)) (evenp (+ l1 l2 l3))))

(defun product-paths (l1 l2 l-max &key (symmetric false))
  "The paths of a tensor product of ranks up to l1 and l2 into ranks up to l-max, [l1 l2 l3] each, in the order of its
weights: by result rank, first those with the higher rank left, then, unless :symmetric, those with it right."
  (let ((found nil))
    (dolist (l3 (range (+ l-max 1)))
      (dolist (high (range (+ l1 1)))
        (dolist (low (range (+ 1 (min high l2))))
          (when (path-allowed high low l3) (setq found (append found [[high low l3]])))))
      (unless symmetric
        (dolist (high (range (+ l2 1)))
          (dolist (low (range (min high (+ l1 1))))
            (when (path-allowed low high l3) (setq found (append found [[low high l3]])))))))
    found))

(defun paths-into (paths rank)
  "How many of the paths result in a rank. A number."
  (length (remove-if-not (lambda (path) (= (third path) rank)) paths)))

(defun spread-ranks (x)
  "One row a rank to one a component: [… l+1 c] -> [… (l+1)² c]."
  (let* ((ranks (dim x -2))
         (component (cast (iota (* ranks ranks)) f32)))
    (gather x (cast (floor (sqrt component)) i32) :axis -2)))

(defun path-ones (count)
  "A vector of ones [count]: weights of a product that has none of its own."
  (+ 1 (* 0 (cast (iota count) f32))))

;; --- scalar networks

(defun normalized-silu (x)
  "silu times 1.6765, which keeps the second moment of a normal variable. The shape of x."
  (* 1.6765324703310907 (silu x)))

(defun normalized-sigmoid (x)
  "sigmoid times 1.8462, which keeps the second moment of a normal variable. The shape of x."
  (* 1.8462285453386054 (sigmoid x)))

(deflayer scaled-linear (x units &key (bias false) (init (normal :std 1)))
  "x w / √in over the last axis, with w standard normal: [… in] -> [… units]. :bias true adds one that starts at 0."
  (let* ((inputs (dim x -1))
         (y (matmul x (* (/ 1 (sqrt inputs)) (param "weight" [inputs units] :init init)))))
    (if bias (+ y (param "bias" [units] :init zeros)) y)))

(deflayer scalar-mlp (x widths &key (activation normalized-silu))
  "Scaled linear maps without bias to each of the widths, the activation between them: [… in] -> [… last width]."
  (let ((last (- (length widths) 1)))
    (reduce (lambda (h i) (let ((y (scaled-linear h (nth i widths)))) (if (< i last) (activation y) y)))
            (range (length widths)) :initial-value x)))

;; --- layers of ranks

(deflayer rank-linear (x channels &key (paths nil) (l-max nil) (init (normal :std 1)))
  "Mixes the channels of each rank by a matrix of its own, without bias: [n (l+1)² c] -> [n (l-max+1)² channels]; ranks
that x lacks are 0, ranks above :l-max are left out. A product that keeps its paths, [n width], gives them as :paths, and
paths are mixed too. Standard normal over √inputs."
  (let* ((top (if paths (reduce max (mapcar third paths)) (top-rank x)))
         (reach (or l-max top))
         (kept (if paths top (min top reach)))
         (components (apply + (mapcar (lambda (p) (+ 1 (* 2 (third p)))) paths)))
         (width (if paths (/ (dim x 1) components) (dim x 2)))
         (weights (mapcar (lambda (rank)
                            (let ((inputs (* width (if paths (paths-into paths rank) 1))))
                              (* (/ 1 (sqrt inputs)) (param (string "weight-" rank) [inputs channels] :init init))))
                          (range (+ kept 1)))))
    (apply equivariant-linear (if paths x (up-to-rank x kept)) (append weights [:l-max reach]))))

(deflayer rank-norm (x &key (eps 1e-6))
  "x over the root of its mean invariant, then scaled by rank and channel. The invariant of a rank is its product with
itself into rank 0, over 2l+1; it is averaged over ranks and channels. The shape of x."
  (let* ((ranks (+ 1 (top-rank x)))
         (c (dim x 2))
         (rank (cast (iota ranks) f32))
         (weights (broadcast (reshape (/ 1 (* ranks (+ 1 (* 2 rank)))) [ranks 1]) [ranks c]))
         (paths (mapcar (lambda (l) [l l 0]) (range ranks)))
         (invariant (tensor-product x x (reshape weights [(* ranks c)]) :l-max 0 :paths paths :reduce-paths true
                                    :symmetric true))
         (m (mean invariant :axis -1 :keep-dims true)))
    (* (* x (rsqrt (+ m eps))) (spread-ranks (param "weight" [ranks c] :init ones)))))

(deflayer interaction (x attributes radial senders receivers channels
                         &key (l-max nil) (hidden [64 64]) (neighbours 1) (norm false)
                              (species nil) (elements nil) (cutoff nil) (element-features 16))
  "Messages from the neighbours: features x [atoms (l+1)² c], edge attributes [edges (l+1)²] and radial functions [edges n]
to [atoms (l-max+1)² channels]. The weights of the product are a network of the radial functions, its sum over neighbours is
divided by √neighbours (a number or a statistic), and x is added by a map of its own. :norm true ends with a `rank-norm`.
With :species, i32 [atoms] of so many :elements, the network sees the elements of both ends too, as so many features each
times the :cutoff [edges]."
  (let* ((top (or l-max (top-rank attributes)))
         (h (rank-linear x channels :name "first"))
         (paths (product-paths (top-rank h) (top-rank attributes) top))
         (radial (if elements (concat [radial (end-features species receivers elements element-features cutoff :name "receiver")
                                             (end-features species senders elements element-features cutoff :name "sender")]
                                     :axis 1)
                     radial))
         (weights (scalar-mlp radial (append hidden [(* channels (length paths))]) :name "radial"))
         (messages (tensor-product h attributes weights senders receivers :l-max top))
         (mixed (rank-linear (/ messages (sqrt neighbours)) channels :paths paths :name "second"))
         (y (+ mixed (rank-linear x channels :l-max top :name "skip"))))
    (if norm (rank-norm y) y)))

(deflayer end-features (species ends elements width cutoff)
  "Trained features of the element at one end of each edge, times the cutoff, so that they go to 0 with it: species i32 [atoms],
ends i32 [edges] and cutoff [edges] to [edges width]. They start within ±0.001."
  (* (embed (param "weight" [elements width] :init (uniform :low -0.001 :high 0.001)) (gather species ends))
     (reshape cutoff [(dim cutoff 0) 1])))

(deflayer gate (x &key (activation normalized-sigmoid) (bias true))
  "x plus a map of x whose ranks and channels are scaled by gates, a function of the scalars. It starts as the identity.
The shape of x."
  (let* ((c (dim x 2))
         (ranks (+ 1 (top-rank x)))
         (value (rank-linear x c :name "value"))
         (gates (activation (scaled-linear (scalars x) (* ranks c) :bias bias :name "gate"))))
    (+ x (rank-linear (* (spread-ranks (reshape gates [(dim x 0) ranks c])) value) c :init zeros :name "out"))))

(defun scale-ranks (x factors)
  "Features with each rank times its number of the list. The shape of x."
  (concat (mapcar (lambda (rank) (* (nth rank factors) (slice x :axis 1 :start (* rank rank) :stop (* (+ 1 rank) (+ 1 rank)))))
                  (range (length factors)))
          :axis 1))

(deflayer product-layer (x &key (correlation 3) (l-max nil) (reduced false) (norm false) (species nil) (elements nil))
  "Products of x with itself up to `correlation` factors, mixed and added: many-body terms, [n (l+1)² c] ->
[n (l-max+1)² c]. With :reduced true the paths of a product are summed with trained weights, 1 at the start, instead of
mixed. With :species, i32 [n] of so many :elements, products have trained weights for each element. :norm true ends with a
`rank-norm`."
  (let* ((c (dim x 2))
         (top (top-rank x))
         (result (or l-max top))
         (trained (or reduced elements))
         (weights (lambda (s width)
                    (cond ((not trained) (path-ones width))
                          (elements (+ 1 (gather (param (string "path-weight-" s) [elements width] :init zeros) species)))
                          (else (+ 1 (param (string "path-weight-" s) [width] :init zeros))))))
         (ranks (+ top 1))
         (first (if trained
                    (* x (spread-ranks (reshape (weights 0 (* ranks c)) (if elements [(dim x 0) ranks c] [ranks c]))))
                    x))
         (current (if reduced first (rank-linear first c :l-max (if (= correlation 1) result top) :name "mix-0")))
         (total (up-to-rank current result)))
    (dolist (s (range 1 correlation))
      (let* ((reach (if (= s (- correlation 1)) result top))
             (paths (product-paths (top-rank current) top reach))
             (product (tensor-product current x (weights s (* c (length paths))) :l-max reach :reduce-paths reduced)))
        (setq current
              (if reduced
                  (scale-ranks product (mapcar (lambda (rank) (/ 1 (sqrt (paths-into paths rank)))) (range (+ reach 1))))
                  (rank-linear product c :paths paths :name (string "mix-" s))))
        (setq total (+ total (up-to-rank current result)))))
    (let* ((mixed (if reduced (rank-linear total c :name "final") total))
           (y (+ mixed (rank-linear x c :l-max result :name "skip"))))
      (if norm (rank-norm y) y))))

;; --- radial functions of edge lengths

(defun chebyshev (lengths &key (count 8) (r-max 5) (r-min 0) (affine false))
  "Chebyshev polynomials T_0 … T_count-1 of cos π s, or with :affine true of 2s - 1, where s = (r - r-min)/(r-max - r-min):
[edges] -> [edges count]."
  (let ((s (reshape (/ (- lengths r-min) (- r-max r-min)) [(dim lengths 0) 1])))
    (if affine
        (let* ((t1 (- (* 2 s) 1)) (t0 (+ 1 (* 0 s))) (found [t0 t1]))
          (dolist (i (range 2 count))
            (setq found (append found [(- (* 2 t1 (nth (- i 1) found)) (nth (- i 2) found))])))
          (concat (subseq found 0 count) :axis 1))
        (cos (* s (* half-turn (cast (iota count) f32)))))))

(defun bessel (lengths &key (count 8) (r-max 5))
  "√(2/r-max) sin(k π r/r-max) / r for k = 1 … count: [edges] -> [edges count] (Gasteiger et al. 2020)."
  (let ((r (reshape lengths [(dim lengths 0) 1])))
    (/ (* (sqrt (/ 2 r-max)) (sin (* (/ r r-max) (* half-turn (+ 1 (cast (iota count) f32)))))) r)))

(defun polynomial-cutoff (lengths &key (r-max 5) (order 6))
  "1 at length 0, 0 from r-max on, with `order` - 1 smooth derivatives at either end of the polynomial. The shape of lengths."
  (let* ((p order)
         (q (/ lengths r-max))
         (a (* 1/2 (+ p 1) (+ p 2)))
         (b (* p (+ p 2)))
         (c (* 1/2 p (+ p 1))))
    (where (< q 1) (- 1 (* (power q p) (+ (- a (* b q)) (* c (* q q))))) 0)))

;; --- from positions to energies, forces and stress

(defun edge-vectors (positions offsets senders receivers)
  "sender - receiver for each edge, with the offsets of periodic images: [edges 3]."
  (+ (- (gather positions senders) (gather positions receivers)) offsets))

(defun vector-lengths (vectors)
  "The Euclidean length over the last axis: [… 3] -> […]."
  (sqrt (sum (* vectors vectors) :axis -1)))

(defun edge-attributes (vectors lengths l-max)
  "The direction tensors of edge vectors: [edges 3] -> [edges (l-max+1)²]. A length below 1e-4 counts as that."
  (cartesian-expand (/ vectors (reshape (max lengths 1e-4) [(dim lengths 0) 1])) :l-max l-max))

(defun sum-by (values index count)
  "The sums of rows with one index: [rows …] -> [count …]."
  (scatter-add values index :count count))

(defun forces-of (energy positions)
  "Minus the gradient of the energies' sum by the positions: [atoms 3]."
  (- (grad (sum energy) positions)))

(defun free-strain (cell)
  "A strain of 0 for each structure, to differentiate by: the shape of cell, [structures 3 3]."
  (variable (* 0 cell)))

(defun strained (vectors strain graph receivers)
  "Edge vectors under 1 plus the symmetric part of their structure's strain: [edges 3]."
  (let ((symmetric (* 1/2 (+ strain (transpose strain)))))
    (+ vectors (einsum vectors (gather symmetric (gather graph receivers)) :equation "ea,eab->eb"))))

(defun stress-of (energy strain volume)
  "The energies' gradient by the strain over the volume, xx yy zz yz xz xy: [structures 6]."
  (let* ((g (dim strain 0))
         (full (/ (grad (sum energy) strain) (reshape volume [g 1 1])))
         (part (lambda (i j) (reshape (slice (slice full :axis 1 :start i :stop (+ i 1)) :axis 2 :start j :stop (+ j 1)) [g 1]))))
    (concat [(part 0 0) (part 1 1) (part 2 2) (part 1 2) (part 0 2) (part 0 1)] :axis 1)))

(defun per-element (table species)
  "The number of each atom's element: [elements] and i32 [atoms] -> [atoms]."
  (gather table species))

;; --- losses: sums over what the masks leave, to be joined as (list sum count)

(defun masked-sum (x mask)
  "The sum of x where the mask of its rows, f32 [rows], is 1. A scalar."
  (if (= (rank x) 1)
      (sum (* x mask))
      (sum (* x (reshape mask (cons (dim x 0) (mapcar (lambda (i) 1) (range 1 (rank x)))))))))

(defun huber-terms (difference delta)
  "d²/2 where |d| < delta, else delta (|d| - delta/2). The shape of the difference."
  (let ((d (abs difference)))
    (where (< d delta) (* 1/2 d d) (* delta (- d (* 1/2 delta))))))

(defun shaped (fraction shape)
  "A fraction of 0 … 1 along a shape: \"linear\", \"cosine\" or \"sqrt\". A scalar."
  (cond ((equal shape "linear") fraction)
        ((equal shape "cosine") (* 1/2 (- 1 (cos (* half-turn fraction)))))
        ((equal shape "sqrt") (sqrt fraction))
        (else (error (string "a shape is linear, cosine or sqrt, not " shape)))))

(defun warmup-hold-shaped (&key peak warmup decay steps (start 1/10) (final 1/1000) (warmup-shape "linear")
                                (decay-shape "sqrt"))
  "The rate of FlashCart: from start·peak up to peak over `warmup` steps, peak, and over the last `decay` of `steps` down to
final·peak. Shapes are \"linear\", \"cosine\" or \"sqrt\". A scalar."
  (let ((up (+ start (* (- 1 start) (shaped (done-fraction 0 warmup) warmup-shape))))
        (down (- 1 (* (- 1 final) (shaped (done-fraction (- steps decay) steps) decay-shape)))))
    (* peak (* up down))))
