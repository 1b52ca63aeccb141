;;; Layers. Weights lie [in out]; every layer takes :name and :share. Functions without parameters open no scope.

(deflayer linear (x units &key (bias true) (init nil))
  "x w + b over the last axis: [… in] -> [… units]. Weight and bias are uniform ±1/√in unless :init says otherwise."
  (let* ((inputs (dim x -1))
         (bound (/ 1 (sqrt inputs)))
         (start (or init (uniform :low (- bound) :high bound)))
         (y (matmul x (param "weight" [inputs units] :init start))))
    (if bias
        (+ y (param "bias" [units] :init (uniform :low (- bound) :high bound)))
        y)))

(deflayer embedding (indices count width &key (init nil))
  "Rows of a table [count width]: indices i32 [… ] -> [… width]. Standard normal unless :init says otherwise."
  (embed (param "weight" [count width] :init (or init (normal :std 1))) indices))

(deflayer layer-norm (x &key (eps 1e-5) (bias true))
  "Each row of the last axis to mean 0 and variance 1, then scaled and shifted by unit: [… d] -> [… d] (Ba et al. 2016)."
  (let ((y (* (normalize x :eps eps) (param "weight" [(dim x -1)] :init ones))))
    (if bias (+ y (param "bias" [(dim x -1)] :init zeros)) y)))

(deflayer rms-norm (x &key (eps 1e-6))
  "Each row of the last axis over its root mean square, then scaled by unit: [… d] -> [… d] (Zhang and Sennrich 2019)."
  (* (normalize x :eps eps :center false) (param "weight" [(dim x -1)] :init ones)))

(defun flatten (x &key (from 1))
  "The axes :from … last as one, in row-major order: [n c h w] -> [n c·h·w]."
  (reshape x (append (subseq (shape x) 0 from) [(reduce * (subseq (shape x) from) :initial-value 1)])))

(defun stack (tensors &key (axis 0))
  "A list of tensors of one shape side by side along a new axis: n of [a b] -> [n a b]."
  (concat (mapcar (lambda (x) (expand-dims x :axis axis)) tensors) :axis axis))

(defun upsample (x factor)
  "Each element of the spatial axes repeated `factor` times along each of them (nearest neighbour): [n c …] -> [n c …]."
  (let ((sizes (subseq (shape x) 2))
        (kept (subseq (shape x) 0 2)))
    (reshape (broadcast (reshape x (append kept (reduce append (mapcar (lambda (n) [n 1]) sizes))))
                        (append kept (reduce append (mapcar (lambda (n) [n factor]) sizes))))
             (append kept (mapcar (lambda (n) (* n factor)) sizes)))))

(defun along-axis (vector axis axes)
  "A vector [c] as a tensor of `axes` axes, all of size 1 but `axis`: to scale one axis of another tensor."
  (reshape vector (mapcar (lambda (i) (if (= i axis) (dim vector 0) 1)) (range axes))))

(deflayer group-norm (x groups &key (eps 1e-5))
  "Channels (axis 1) in groups, each group of a sample to mean 0 and variance 1, then scaled and shifted by channel:
[n c …] -> [n c …] (Wu and He 2018)."
  (let* ((sizes (shape x))
         (c (dim x 1))
         (parts (reshape x (append [(dim x 0) groups (/ c groups)] (subseq sizes 2))))
         (y (reshape (normalize parts :axis (range 2 (rank parts)) :eps eps) sizes)))
    (+ (* y (along-axis (param "weight" [c] :init ones) 1 (rank x)))
       (along-axis (param "bias" [c] :init zeros) 1 (rank x)))))

(deflayer batch-norm (x &key (axis 1) (momentum 0.1) (eps 1e-5))
  "Each channel (:axis) to mean 0 and variance 1 over the micro-batch, then scaled and shifted (Ioffe and Szegedy 2015).
The states `mean` and `variance` follow those of training by :momentum and stand for them in evaluations. Any shape."
  (let* ((axes (rank x))
         (place (mod axis axes))
         (c (dim x place))
         (others (remove-if (lambda (i) (= i place)) (range axes)))
         (count (reduce (lambda (n i) (* n (dim x i))) others :initial-value 1))
         (weight (along-axis (param "weight" [c] :init ones) place axes))
         (bias (along-axis (param "bias" [c] :init zeros) place axes))
         (old-mean (state "mean" [c] :init zeros))
         (old-variance (state "variance" [c] :init ones)))
    (if (training)
        (let* ((m (mean x :axis others))
               (d (- x (along-axis m place axes)))
               (v (mean (* d d) :axis others)))
          (set-state! "mean" (stop-gradient (+ (* (- 1 momentum) old-mean) (* momentum m))))
          (set-state! "variance"
            (stop-gradient (+ (* (- 1 momentum) old-variance) (* (* momentum (/ count (max 1 (- count 1)))) v))))
          (+ (* (normalize x :axis others :eps eps) weight) bias))
        (+ (* (* (- x (along-axis old-mean place axes)) (rsqrt (+ (along-axis old-variance place axes) eps))) weight) bias))))

(defun same-padding (x sizes dilation)
  "x [n c …] padded by zeros so that a convolution of stride 1 with a kernel of `sizes` keeps its spatial sizes; where the
two ends cannot be equal, the last has one more, as in torch. `dilation` is a number or a list."
  (let* ((dilations (if (listp dilation) dilation (mapcar (lambda (i) dilation) sizes)))
         (spans (mapcar (lambda (size d) (* d (- size 1))) sizes dilations)))
    (pad x :before (append [0 0] (mapcar (lambda (span) (floor span 2)) spans))
           :after (append [0 0] (mapcar (lambda (span) (ceiling span 2)) spans)))))

(deflayer convolution (x channels kernel &key (stride 1) (padding 0) (dilation 1) (groups 1) (bias true) (init nil))
  "The correlation of x [n c …] with `channels` kernels over 1 to 3 axes, as torch: -> [n channels …]. kernel, :stride,
:padding and :dilation are a number or a list, one an axis; :padding 'same keeps the sizes, at stride 1. Weight [channels c/groups kernel …]; uniform ±1/√(c/groups ∏kernel)."
  (let* ((sizes (if (listp kernel) kernel (mapcar (lambda (i) kernel) (range (- (rank x) 2)))))
         (inputs (/ (dim x 1) groups))
         (bound (/ 1 (sqrt (reduce * sizes :initial-value inputs))))
         (start (or init (uniform :low (- bound) :high bound)))
         (weight (param "weight" (append [channels inputs] sizes) :init start))
         (same (equal padding 'same))
         (x (if same (same-padding x sizes dilation) x))
         (padding (if same 0 padding)))
    (assert (or (not same) (every (lambda (s) (= s 1)) (if (listp stride) stride [stride])))
            ":padding 'same goes with :stride 1")
    (if bias
        (convolve x weight (param "bias" [channels] :init (uniform :low (- bound) :high bound))
                  :stride stride :padding padding :dilation dilation :groups groups)
        (convolve x weight :stride stride :padding padding :dilation dilation :groups groups))))

(deflayer transposed-convolution (x channels kernel &key (stride 1) (padding 0) (groups 1) (bias true) (init nil))
  "The transpose of a `convolution`, to upsample: x [n c …] -> [n channels …], of the smallest size, as torch.
Weight [c channels/groups kernel …]; uniform ±1/√(channels/groups ∏kernel)."
  (let* ((sizes (if (listp kernel) kernel (mapcar (lambda (i) kernel) (range (- (rank x) 2)))))
         (outputs (/ channels groups))
         (bound (/ 1 (sqrt (reduce * sizes :initial-value outputs))))
         (start (or init (uniform :low (- bound) :high bound)))
         (weight (param "weight" (append [(dim x 1) outputs] sizes) :init start))
         (y (convolve-transpose x weight :stride stride :padding padding :groups groups)))
    (if bias
        (+ y (along-axis (param "bias" [channels] :init (uniform :low (- bound) :high bound)) 1 (rank y)))
        y)))

(deflayer moving-mean (x &key (decay 0.99))
  "An exponential moving average of x over training steps: m <- decay m + (1 - decay) x from 0, corrected for its start
as Adam's moments are. In evaluations, the average so far. The shape of x; no gradient."
  (let* ((total (state "total" (shape x) :init zeros))
         (weight (state "weight" [] :init zeros))
         (new-total (+ (* decay total) (* (- 1 decay) (stop-gradient x))))
         (new-weight (+ (* decay weight) (- 1 decay))))
    (if (training)
        (/ (set-state! "total" new-total) (set-state! "weight" new-weight))
        (/ total (max weight 1e-30)))))

(defun dropout (x rate)
  "In training each element is 0 with probability rate, else scaled by 1/(1 - rate); elsewhere x (Srivastava et al. 2014).
Rate 0 makes no draw. Any shape."
  (cond ((or (not (training)) (= rate 0)) x)
        ((= rate 1) (* 0 x))
        (else (* x (* (/ 1 (- 1 rate)) (cast (random-bernoulli x :p (- 1 rate)) f32))))))

(defun residual (x layer)
  "x + layer(layer-norm(x)): the pre-norm residual connection (Xiong et al. 2020). The shape of x."
  (+ x (layer (layer-norm x))))

(defun rotary-embedding (x &key (base 10000))
  "Rotates pairs (i, i + d/2) of the last axis by angles that grow with the position on the last but one:
[… t d] -> [… t d], d even (Su et al. 2021; halves as in Llama)."
  (let* ((t (dim x -2))
         (d (dim x -1))
         (half (/ d 2))
         (frequency (exp (* (/ (* -2 (log (float base))) d) (cast (iota half) f32))))
         (angle (* (reshape (cast (iota t) f32) [t 1]) frequency))
         (c (cos angle))
         (s (sin angle))
         (a (slice x :axis -1 :stop half))
         (b (slice x :axis -1 :start half)))
    (concat [(- (* a c) (* b s)) (+ (* b c) (* a s))] :axis -1)))

(defun split-heads (x heads)
  "[b t d] -> [b heads t d/heads]."
  (destructuring-bind (b t d) (shape x)
    (transpose (reshape x [b t heads (/ d heads)]) [0 2 1 3])))

(defun join-heads (x)
  "[b heads t d] -> [b t heads·d]: undoes `split-heads`."
  (destructuring-bind (b heads t d) (shape x)
    (reshape (transpose x [0 2 1 3]) [b t (* heads d)])))

(deflayer attention (x &key (heads 1) (kv-heads nil) (memory nil) (mask nil) (causal false) (window nil) (rotary false)
                         (bias true) (drop-rate 0))
  "Multi-head attention: x [b t d] -> [b t d] (Vaswani et al. 2017). Keys and values come from :memory [b s e], or x.
:causal sees the own and earlier positions, :window the last so many, :mask (bool, [b heads t s] or what broadcasts to
it) where it holds; :rotary rotates queries and keys by position; :drop-rate acts on the result.
:kv-heads, a divisor of heads, shares keys and values among groups of heads (Ainslie et al. 2023)."
  (let* ((d (dim x -1))
         (source (if (tensorp memory) memory x))
         (shared (or kv-heads heads))
         (narrow (* shared (/ d heads)))
         (turn (if rotary rotary-embedding identity))
         (q (turn (split-heads (linear x d :bias bias :name "query") heads)))
         (k (turn (split-heads (linear source narrow :bias bias :name "key") shared)))
         (v (split-heads (linear source narrow :bias bias :name "value") shared))
         (seen (if (tensorp mask)
                   (attend q k v mask :causal causal :window window)
                   (attend q k v :causal causal :window window))))
    (dropout (linear (join-heads seen) d :bias bias :name "out") drop-rate)))

(deflayer feed-forward (x &key (hidden nil) (activation gelu) (bias true) (drop-rate 0))
  "Two linear layers around an activation: [… d] -> [… d], with :hidden units (4 d) between (Vaswani et al. 2017)."
  (let* ((d (dim x -1))
         (h (activation (linear x (or hidden (* 4 d)) :bias bias :name "up"))))
    (dropout (linear h d :bias bias :name "down") drop-rate)))

(deflayer gated-feed-forward (x hidden &key (activation silu) (bias false) (drop-rate 0))
  "down(activation(gate(x)) · up(x)): [… d] -> [… d] by way of [… hidden]; with silu it is SwiGLU (Shazeer 2020)."
  (let ((h (* (activation (linear x hidden :bias bias :name "gate")) (linear x hidden :bias bias :name "up"))))
    (dropout (linear h (dim x -1) :bias bias :name "down") drop-rate)))

(deflayer transformer-block (x &key (heads 1) (causal false) (rotary false) (drop-rate 0))
  "Attention and a feed-forward network, each a pre-norm residual: [b t d] -> [b t d]."
  (let ((y (residual x (lambda (u) (attention u :heads heads :causal causal :rotary rotary :drop-rate drop-rate)))))
    (residual y (lambda (u) (feed-forward u :drop-rate drop-rate)))))
